"""Drafting text in the drafter's own tokens, encoded in the target's: no shared token is needed.

SLEM (Timor et al., arXiv 2502.05202, Algorithm 2). The target's token is compared with what the
drafted text becomes, so any text may be drafted. Committed tokens stay as they are. Encoding only
the last of them together with what follows gives, away from the window's start, what encoding the
whole text gives. Tokens are aligned by the bytes that they write.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate

import numpy as np

from ....core.arrays import ROOT, Int32
from ....core.proposals import UNSHAPED, DraftRequest
from ...coupled_rank import CoupledChoice
from ..text_distribution import TextDistribution
from .strategy import DraftNodes, DraftText, special_ids
from .surfaces import Speller, Vocabulary
from .target_noise import TargetNoise, TargetTokens

LOOKBEHIND = 10
# A byte of UTF-8 that goes on with a character: 10xxxxxx.
CONTINUES, CONTINUES_MASK = 0x80, 0xC0
MAX_SEED = 2**63 - 1
# Committed target ids that a text remembers: what is looked behind at.
REMEMBERED = 16


class Retokenizer:
    """Encodes text in one vocabulary, looking behind at the last tokens.

    Bytes that are no whole character are held back: no text can say them.
    """

    __slots__ = ("_lookbehind", "_speller", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, lookbehind: int = LOOKBEHIND) -> None:
        self._vocabulary = vocabulary
        self._lookbehind = lookbehind
        self._speller = Speller(vocabulary)

    def continuation(self, committed: Sequence[int], text: bytes) -> list[int]:
        """Tokens of `text` behind committed ones, none of which changes.

        Where a token of the whole text would begin within the committed ones, `text` is encoded
        by itself. Tokens of an incomplete last character are left out.
        """
        window = self._window(committed)
        whole = window + text
        whole = whole[: complete_len(whole)]
        if len(whole) <= len(window):
            return []
        added = whole[len(window) :]
        encoded = self._encode(whole)
        if encoded is None:
            return []
        ids, starts = encoded
        if len(window) in starts:
            # Of several the last: a token before it may have been put before the text's first word.
            following = ids[len(starts) - 1 - starts[::-1].index(len(window)) :]
            if self._vocabulary.bytes_of(following) == added:
                return following
        return list(self._speller.spell(added))

    def rewritten(self, own: Sequence[int], text: bytes) -> tuple[int, list[int]]:
        """How `text` is appended to tokens of one's own, which may change.

        Returns how many of them stay, and what follows these. `text` ends between characters.
        """
        window = self._window(own)
        encoded = self._encode(window + text)
        if encoded is None:
            return len(own), list(self._speller.spell(text))
        ids, starts = encoded
        agreed = self._agreed(own, len(window), dict(zip(starts, ids, strict=False)))
        if agreed is not None:
            kept, border = agreed
            following = ids[starts.index(border) :]
            # A space before the first word is right where no other text is before it.
            is_first = not window or not kept
            if is_first or self._vocabulary.bytes_of(following) == (window + text)[border:]:
                return kept, following
        return len(own), list(self._speller.spell(text))

    def _agreed(
        self, own: Sequence[int], window_len: int, token_at: Mapping[int, int]
    ) -> tuple[int, int] | None:
        """How many of one's own tokens stay, and where in the window they end.

        Tokens at the window's start may differ for want of what is before them; from the first
        that is the same on, they stay as long as they are the same. None where no token is, and the
        window begins within one.
        """
        first, start = len(own), window_len
        while start > 0:
            first -= 1
            start -= len(self._vocabulary.surface(own[first]))
        agreed = (first, 0) if start == 0 else None
        has_met = False
        for place in range(first, len(own)):
            end = start + len(self._vocabulary.surface(own[place]))
            if token_at.get(start) == own[place]:
                agreed, has_met = (place + 1, end), True
            elif has_met:
                break
            start = end
        return agreed

    def _window(self, ids: Sequence[int]) -> bytes:
        """Bytes of the last tokens, from the beginning of a character on, and behind the last
        special token."""
        surfaces: list[bytes] = []
        for token in reversed(ids[-self._lookbehind :]):
            surface = self._vocabulary.surface(token)
            if not surface:
                break
            surfaces.append(surface)
        window = b"".join(reversed(surfaces))
        return window[_first_whole(window) :]

    def _encode(self, text: bytes) -> tuple[list[int], list[int]] | None:
        """Tokens of a text, and where each of them begins and the last one ends.

        None where they do not write this text: it is no UTF-8, or the tokenizer changes it.
        """
        try:
            ids = self._vocabulary.encode(text.decode())
        except UnicodeDecodeError:
            return None
        surfaces = [self._vocabulary.surface(token) for token in ids]
        # Some put a space before a text's first word.
        extra = sum(map(len, surfaces)) - len(text)
        written = b"".join(surfaces)
        if extra not in (0, 1) or written[extra:] != text or written[:extra].strip(b" "):
            return None
        starts = [0, *accumulate(map(len, surfaces))]
        return ids, [max(0, start - extra) for start in starts]


def complete_len(text: bytes) -> int:
    """Bytes of `text` without an incomplete character at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & CONTINUES_MASK != CONTINUES:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(text) if needed <= back else len(text) - back
    return len(text)


def _first_whole(text: bytes) -> int:
    """Where the first character begins whose beginning is there."""
    skipped = 0
    while skipped < len(text) and text[skipped] & CONTINUES_MASK == CONTINUES:
        skipped += 1
    return skipped


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
        """The request's temperature and filters, without biases: they name the target's ids."""
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
        log_probs = [float(drafted.log_probs[node]) for node in path]
        sums = [0.0, *accumulate(log_probs)]
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
            yield self._target.end, min(0.0, log_probs[len(own)])


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
