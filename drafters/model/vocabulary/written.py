"""Drafting text in the drafter's own tokens, encoded in the target's: no shared token is needed.

SLEM (Timor et al., arXiv 2502.05202, Algorithm 2). The target's token is compared with what the
drafted text becomes, so any text may be drafted.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate

import numpy as np

from ....core.arrays import ROOT, Int32
from ....core.proposals import UNSHAPED, DraftRequest
from ...coupled_rank import CoupledChoice
from ..text_distribution import TextDistribution
from .mapped import special_ids
from .retokenizer import Retokenizer, complete_len
from .strategy import DraftNodes, DraftText
from .surfaces import Vocabulary
from .target_noise import TargetNoise, TargetTokens

MAX_SEED = 2**63 - 1
# Committed target ids that a text remembers: what is looked behind at.
REMEMBERED = 16


class WrittenText:
    """A text in the drafter's tokens, as its tokenizer writes it.

    The last of them may change with what follows. Bytes of an incomplete character are held back.

    committed  the last target ids
    held       bytes of the character that the text ends in, if it is incomplete
    """

    __slots__ = ("_draft", "_retokenizer", "_target", "committed", "held", "tokens")

    def __init__(
        self,
        draft: Vocabulary,
        target: Vocabulary,
        retokenizer: Retokenizer,
        token_ids: Sequence[int],
    ) -> None:
        self._draft = draft
        self._target = target
        self._retokenizer = retokenizer
        self.held = b""
        self.tokens: list[int] = []
        self.committed: list[int] = []
        self.extend(token_ids)

    def extend(self, committed: Sequence[int]) -> int:
        """Append committed target ids; returns how many of the tokens before stay as they were."""
        before = kept = len(self.tokens)
        text = self.held
        for token in committed:
            special = special_ids(token, self._draft, self._target)
            if special:
                kept = min(kept, self._write(text))
                self.tokens.extend(special)
                text = b""
            else:
                text += self._target.surface(token)
        whole = complete_len(text)
        kept = min(kept, self._write(text[:whole]))
        self.held = text[whole:]
        self.committed = [*self.committed, *committed][-REMEMBERED:]
        return min(kept, before)

    def behind(self, assumed: Sequence[int]) -> tuple[WrittenText, int]:
        """The text with target ids behind it, and how many of its tokens stay as they are."""
        text = copy(self)
        text.tokens = list(self.tokens)
        return text, text.extend(assumed)

    def _write(self, text: bytes) -> int:
        if not text:
            return len(self.tokens)
        kept, following = self._retokenizer.rewritten(self.tokens, text)
        self.tokens[kept:] = following
        return kept


class WrittenVocabulary:
    """Draws are the drafter's own tokens, whose text is encoded behind the committed ids.

    The noise of the target's tokens may rank them, by what their text becomes (`target_noise`).
    Otherwise draws have noise of their own. Of the request's parameters temperature and filters
    apply.
    """

    draws_target_ids = False
    is_declared = False

    def __init__(
        self, draft: Vocabulary, target: Vocabulary, size: int, target_size: int,
        draws_per_token: float = 1.0,
    ) -> None:  # fmt: skip
        """`size` and `target_size`: ids of the drafter's model and of the target's.

        draws_per_token  tokens of the drafter that write one of the target's, about
        """
        self._draws_per_token = draws_per_token
        self.size = size
        self._target_size = target_size
        self._draft = draft
        self._target = target
        self._own = Retokenizer(draft)
        self._others = Retokenizer(target)
        self._target_tokens = TargetTokens(draft, target)

    def num_draws(self, num_tokens: int) -> int:
        """Draws that write about so many of the target's tokens."""
        return num_draws(num_tokens, self._draws_per_token)

    def text(self, request: DraftRequest) -> DraftText:
        """The text of a request that opens."""
        return WrittenText(self._draft, self._target, self._own, request.token_ids.tolist())

    def knows(self, tokens: Int32) -> bool:
        """Whether all are ids of the target's vocabulary."""
        return bool(np.all((tokens >= 0) & (tokens < self._target_size)))

    def fed(self, token: int) -> int:
        """The id itself."""
        return token

    def distribution(self, request: DraftRequest) -> TextDistribution:
        """The request's temperature and filters; what is said by token is the target's."""
        given = request.logits_params
        filters = replace(
            UNSHAPED,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
            typical_p=given.typical_p,
        )
        seed = zlib.crc32(b"text %d" % request.seed)
        return TextDistribution(request.temperature, seed, filters, None, None, num_answered=0)

    def target_noise(self, text: DraftText, choice: CoupledChoice) -> TargetNoise | None:
        """The noise of the target's tokens that drafted text becomes; None within a character."""
        assert isinstance(text, WrittenText)
        if text.held:
            return None
        return TargetNoise(self._target_tokens, text.committed[-1], choice)

    def nodes(self, text: DraftText, drafted: DraftNodes) -> DraftNodes:
        """The drafted paths, each encoded as a whole, merged by prefix.

        A node's log-probability is that of the drafter's tokens that write it: of those that end
        within it.
        """
        assert isinstance(text, WrittenText)
        tokens: list[int] = []
        parents: list[int] = []
        log_probs: list[float] = []
        node_of: dict[tuple[int, int], int] = {}
        for path in _paths(drafted.parents.tolist()):
            node = ROOT
            for token, log_prob in self._encoded(text, drafted, path):
                key = node, token
                if key not in node_of:
                    node_of[key] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    log_probs.append(log_prob)
                node = node_of[key]
        return DraftNodes(
            np.array(tokens, dtype=np.int32),
            np.array(parents, dtype=np.int32),
            np.array(log_probs, dtype=np.float32),
        )

    def _encoded(
        self, text: WrittenText, drafted: DraftNodes, path: Sequence[int]
    ) -> Iterator[tuple[int, float]]:
        """Target ids of one path with their log-probabilities."""
        own = [int(drafted.tokens[node]) for node in path]
        ends_text = self._draft.end in own
        if ends_text:
            own = own[: own.index(self._draft.end)]  # type: ignore[arg-type]
        written = [self._draft.surface(token) for token in own]
        drawn = b"".join(written)
        if not drawn.startswith(text.held):
            return
        said = [float(drafted.log_probs[node]) for node in path]
        sums = [0.0, *accumulate(said)]
        ends = [0, *accumulate(map(len, written))]
        ids = self._others.continuation(text.committed, drawn[len(text.held) :])
        before, place, index = 0.0, len(text.held), 0
        for token in ids:
            place += len(self._target.surface(token))
            while index < len(own) and ends[index] < place:
                index += 1
            yield token, min(0.0, sums[index] - before)
            before = sums[index]
        if ends_text and self._target.end is not None and place == len(drawn):
            yield self._target.end, min(0.0, said[len(own)])


def num_draws(num_tokens: int, draws_per_token: float) -> int:
    """Draws that write about so many of the target's tokens; none for none."""
    return math.ceil(num_tokens * draws_per_token)


def _paths(parents: Sequence[int]) -> Iterator[list[int]]:
    """The paths from the root to the leaves, in the order of the leaves' ancestors' first nodes."""
    with_children = set(parents)
    for leaf in range(len(parents)):
        if leaf in with_children:
            continue
        path, node = [], leaf
        while node != ROOT:
            path.append(node)
            node = parents[node]
        yield path[::-1]
