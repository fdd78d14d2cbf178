"""ANPD: Adaptive N-gram Parallel Decoding, a chain grown by n-gram counts of several levels.

Ou, Chen and Tian 2024, "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel
Decoding" (arXiv 2404.08698). The tables of all levels are one suffix automaton.
See docs/drafters.md, "ANPD".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.arrays import Float32, Int32
from ...core.compiled import compiled
from ...core.proposals import (
    Commit,
    DraftRequest,
    Proposal,
    Query,
    chain_proposal,
    empty_proposal,
)
from ..open_requests import StatefulDrafter
from ..option_checks import require_whole
from ..suffix.automaton import (
    BEST_EDGE,
    CONTEXT,
    CONTEXT_LEN,
    COUNT,
    LAST_END,
    LENGTH,
    LINK,
    NONE,
    NUM_TOKENS,
    ROOT_STATE,
    TARGET,
    TOKEN,
    Automaton,
    advanced,
    suffix_state,
)
from ..suffix.counts import RecentCounts, grown_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class AnpdOptions:
    """Options of `AnpdDrafter`; raises `ConfigError` naming the option.

    ngram       N: a token is chosen by at most N-1 tokens before it
    num_tokens  K: most tokens of a draft
    window      n-grams are counted among so many of the latest tokens, at least half as many
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = ("window",)

    ngram: int = 5
    num_tokens: int = 7
    window: int = 65536

    def __post_init__(self) -> None:
        require_whole("ngram", self.ngram, 2, 64)
        require_whole("num_tokens", self.num_tokens, 1, 1024)
        require_whole("window", self.window, 2)


class _Request:
    """The n-gram counts of one request's text."""

    __slots__ = ("committed_len", "counts")

    def __init__(self, options: AnpdOptions) -> None:
        self.counts = RecentCounts(options.window, options.ngram)
        self.committed_len = 0

    @property
    def memory_bytes(self) -> int:
        return self.counts.memory_bytes

    def extend(self, tokens: Int32) -> None:
        self.counts.append(tokens)
        self.committed_len += len(tokens)


class AnpdDrafter(StatefulDrafter[_Request]):
    """Proposes one chain: after each token the one that followed its longest known context most.

    Of equally frequent tokens the latest is taken. Only committed tokens are counted. A token's
    probability is its count by that of all tokens after the same context.
    """

    def __init__(self, name: str = "anpd", options: AnpdOptions | None = None) -> None:
        super().__init__(name)
        self._options = options or AnpdOptions()
        # Compiles the loops, or reads them from disk, before a request waits for them.
        _draft(grown_counts().automaton, np.zeros(1, dtype=np.int32), 1, 1)

    def _state(self, request: DraftRequest) -> _Request:
        state = _Request(self._options)
        state.extend(request.token_ids)
        return state

    def _learn(self, state: _Request, commit: Commit) -> None:
        state.extend(commit.tokens)

    def _propose(self, state: _Request, query: Query) -> Proposal:
        room = min(self._options.num_tokens, query.max_nodes)
        if room <= 0:
            return empty_proposal(self._name)
        following = np.array(query.assumed or (), dtype=np.int32)
        automaton = state.counts.automaton
        tokens, log_probs = _draft(automaton, following, room, self._options.ngram - 1)
        return chain_proposal(self._name, tokens, log_probs)


@compiled
def _draft(
    automaton: Automaton, assumed: Int32, num_tokens: int, max_context: int
) -> tuple[Int32, Float32]:
    """Tokens int32 [n] and log-probabilities float32 [n] of a chain behind the text and the tokens
    that are assumed to follow it, which are not counted."""
    states, edges, _, cursor = automaton
    tokens = np.empty(num_tokens, dtype=np.int32)
    log_probs = np.empty(num_tokens, dtype=np.float32)
    first, first_len = cursor[CONTEXT], cursor[CONTEXT_LEN]
    state, length = advanced(automaton, first, first_len, assumed, max_context)
    for index in range(num_tokens):
        while state != ROOT_STATE and states[state, BEST_EDGE] == NONE:
            state = states[state, LINK]
            length = states[state, LENGTH]
        if state == ROOT_STATE:
            return tokens[:index], log_probs[:index]
        edge = states[state, BEST_EDGE]
        target = edges[edge, TARGET]
        # At the end of the text nothing follows the context yet.
        followed = states[state, COUNT] - (states[state, LAST_END] == cursor[NUM_TOKENS] - 1)
        tokens[index] = edges[edge, TOKEN]
        log_probs[index] = math.log(states[target, COUNT] / followed)
        length = min(length + 1, max_context)
        state = suffix_state(states, target, length)
    return tokens, log_probs
