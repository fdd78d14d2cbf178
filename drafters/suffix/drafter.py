"""Suffix decoding: what followed the text's suffixes most often, here and in earlier answers.

Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications"
(arXiv 2411.04975), with the drafts of Arctic Inference. See docs/drafters.md,
"Suffix decoding".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.arrays import Int32
from ...core.compiled import address_of
from ...core.errors import ConfigError
from ...core.proposals import DraftRequest
from ...core.tree.proposal_batch import ProposalBatch
from ..open_requests import AssumedTokens, BatchedDrafter
from ..option_checks import require_fraction, require_number, require_switches, require_whole
from .automaton import extend_all
from .counts import RecentCounts, SuffixCounts, grown_counts
from .drafts import Limits, draft_all

# Namespace and cache salt.
Sharing = tuple[str, str]

NO_ANSWERS = SuffixCounts(max_depth=1)
# Of the text of a request when it opens.
FIRST_ROOM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions:
    """Options of `SuffixDrafter`; raises `ConfigError` naming the option.

    max_match_len    longest suffix of the text that is looked up
    num_tokens       most tokens of a draft
    max_spec_factor, max_spec_offset  a suffix of m tokens is continued by at most
                     factor * m + offset tokens
    min_token_prob   least probability that all tokens up to one are accepted, by the counts
    tree             drafts are trees of the most probable nodes, not single paths
    window           so many of the latest tokens of a request are counted, at least half as many
    answer_tokens    the same for ended answers of one namespace and cache salt; 0: none are counted
    max_namespaces   pairs of namespace and cache salt whose answers are kept, the latest
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = (
        "max_spec_offset",
        "tree",
        "window",
        "max_namespaces",
    )

    max_match_len: int = 64
    num_tokens: int = 16
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    tree: bool = True
    window: int = 65536
    answer_tokens: int = 65536
    max_namespaces: int = 32

    def __post_init__(self) -> None:
        require_whole("max_match_len", self.max_match_len, 1, 1024)
        require_whole("num_tokens", self.num_tokens, 1, 1024)
        require_number("max_spec_factor", self.max_spec_factor, 0)
        require_number("max_spec_offset", self.max_spec_offset, -1024)
        require_fraction("min_token_prob", self.min_token_prob)
        require_switches(self, "tree")
        require_whole("window", self.window, 2)
        require_whole("answer_tokens", self.answer_tokens, 0)
        if self.answer_tokens == 1:
            raise ConfigError("answer_tokens", "must be 0, or at least 2")
        require_whole("max_namespaces", self.max_namespaces, 1)

    @property
    def max_depth(self) -> int:
        """Tokens of the longest suffix and draft together."""
        return self.max_match_len + self.num_tokens


class _Request:
    """The counts of one request's text, and the text from the prompt's last tokens on."""

    __slots__ = (
        "_address", "_answer_start", "_max_match_len", "_num_held", "_text", "committed_len",
        "counts", "sharing", "store",
    )  # fmt: skip

    def __init__(self, request: DraftRequest, options: SuffixOptions) -> None:
        self.sharing: Sharing = (request.namespace, request.cache_salt)
        self.store = request.store
        self.counts = RecentCounts(options.window, options.max_depth)
        self.committed_len = len(request.token_ids)
        self._max_match_len = options.max_match_len
        first = max(0, min(request.prompt_len, self.committed_len) - options.max_match_len)
        self._answer_start = request.prompt_len - first
        self._num_held = self.committed_len - first
        self._hold(request.token_ids[first:], self._num_held)
        self.counts.append(request.token_ids)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the counts and the text."""
        return self.counts.memory_bytes + self._text.nbytes

    @property
    def answer(self) -> Int32:
        """What was generated, int32 [n]."""
        return self._text[self._answer_start : self._num_held]

    def reserve(self, count: int) -> None:
        """Count further tokens as committed."""
        self.committed_len += count

    def append(self, tokens: Int32) -> None:
        """Add tokens to the text; they are counted apart."""
        end = self._num_held + len(tokens)
        if end > len(self._text):
            self._hold(self._text[: self._num_held], end)
        self._text[self._num_held : end] = tokens
        self._num_held = end

    def context(self) -> tuple[int, int]:
        """Where the last tokens of the text are, and how many."""
        count = min(self._num_held, self._max_match_len)
        return self._address + 4 * (self._num_held - count), count

    def context_behind(self, assumed: Int32) -> Int32:
        """The last tokens of the text with these behind it."""
        text = self._text[: self._num_held]
        return np.concatenate([text[-self._max_match_len :], assumed])[-self._max_match_len :]

    def _hold(self, tokens: Int32, num_tokens: int) -> None:
        """Go on in an array for so many tokens and more, of which these are the first."""
        self._text = np.empty(3 * num_tokens // 2 + FIRST_ROOM, dtype=np.int32)
        self._text[: len(tokens)] = tokens
        self._address = address_of(self._text)


class SuffixDrafter(BatchedDrafter[_Request]):
    """Proposes the better of two drafts: by the request's own text, and by earlier answers.

    An answer is counted when its request closes, for requests of the same namespace and cache salt
    and no others.
    """

    def __init__(self, name: str = "suffix", options: SuffixOptions | None = None) -> None:
        super().__init__(name)
        self._options = options or SuffixOptions()
        # Whole numbers would have the loops compiled again.
        self._limits: Limits = (
            float(self._options.max_spec_factor),
            float(self._options.max_spec_offset),
            float(self._options.min_token_prob),
            self._options.tree,
        )
        # By namespace and cache salt; the latest to end an answer is the last.
        self._answers: dict[Sharing, RecentCounts] = {}
        # Compiles the loops, or reads them from disk, before a request waits for them.
        grown_counts()
        first = _Request(DraftRequest("", np.zeros(1, dtype=np.int32), 1, 0.0, 0), self._options)
        self._extend_all([first], [np.zeros(1, dtype=np.int32)])
        self._propose_all([first], [1], AssumedTokens.none(1))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the counts of all open requests and of all answers."""
        answers = list(self._answers.values())
        return self._requests.memory_bytes + sum(counts.memory_bytes for counts in answers)

    def open(self, request: DraftRequest) -> None:
        """Begin a request. Raises `DrafterError` if it has no committed token."""
        self._requests.put(request.request_id, self._state(request))

    def close(self, request_id: str) -> None:
        """Forget a request, but for its answer; an unknown id is ignored."""
        state = self._requests.drop(request_id)
        if state is not None and state.store and self._options.answer_tokens:
            self._keep_answer(state.sharing, state.answer)

    def check_integrity(self) -> None:
        """Assert that all counts agree with each other and stay within their bounds."""
        for state in self._requests:
            state.counts.check_integrity()
        for counts in self._answers.values():
            counts.check_integrity()
        assert len(self._answers) <= self._options.max_namespaces

    def _state(self, request: DraftRequest) -> _Request:
        return _Request(request, self._options)

    def _extend_all(self, states: Sequence[_Request], tokens: Sequence[Int32]) -> None:
        rows: list[tuple[int, ...]] = []
        spans: list[tuple[int, int]] = []
        is_alone = len(set(map(id, states))) == len(states)
        first = 0
        for state, own in zip(states, tokens, strict=True):
            state.append(own)
            taken = state.counts.take(len(own)) if is_alone else ()
            if not taken:
                state.counts.append(own)
            rows += taken
            spans += [(first, first + len(own))] * len(taken)
            first += len(own)
        if rows:
            extend_all(
                np.array(rows, dtype=np.int64),
                np.concatenate(tokens),
                np.array(spans, dtype=np.int64),
                self._options.max_depth,
            )

    def _keep_answer(self, sharing: Sharing, answer: Int32) -> None:
        if not len(answer):
            return
        options = self._options
        counts = self._answers.pop(sharing, None)
        if counts is None:
            counts = RecentCounts(options.answer_tokens, options.max_depth)
            if len(self._answers) == options.max_namespaces:
                del self._answers[next(iter(self._answers))]
        self._answers[sharing] = counts
        counts.start_text()
        counts.append(answer)

    def _propose_all(
        self, states: Sequence[_Request], max_nodes: Sequence[int], assumed: AssumedTokens
    ) -> ProposalBatch:
        answers = self._answers
        rows = [
            (
                *state.counts.row,
                *answers.get(state.sharing, NO_ANSWERS).row,
                *state.context(),
                0,
            )
            for state in states
        ]
        # Held until the loops have read them.
        contexts: list[Int32] = []
        for place in assumed.places:
            context = states[place].context_behind(path := assumed.path(place))
            contexts.append(context)
            behind = address_of(context), len(context), min(len(path), len(context))
            rows[place] = (*rows[place][:-3], *behind)
        rooms = np.minimum(np.array(max_nodes, dtype=np.int64), self._options.num_tokens)
        drafts = draft_all(np.array(rows, dtype=np.int64), rooms, self._limits)
        return ProposalBatch(self._name, *drafts)
