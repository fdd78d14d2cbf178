"""Lookahead decoding: n-grams that the target itself makes beside every step.

Fu et al. 2024 (arXiv 2402.02057), `hao-ai-lab/LookaheadDecoding`. A window of guessed tokens runs
through the target as a `Probe`, in Jacobi iterations; what comes out at its far end completes
n-grams, and those that begin with the last committed token are the guesses. Needs no training.
Worked example, and differences from the paper's code: docs/drafters.md, "Lookahead".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.proposals import Commit, DraftRequest, Proposal, Query
from ...core.tree.merge import ProposalTrie
from ..open_requests import StatefulDrafter
from ..option_checks import require_switches, require_whole
from .candidate_pool import CandidatePool, require_probe_fits
from .ngram_dictionaries import ForwardDictionary


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadOptions:
    """Options of `LookaheadDrafter`; raises `ConfigError` naming the option.

    ngram             N: length of the n-grams, the token that they begin with included (LEVEL)
    window            W: columns of the window; a probe has (N-1) W - 1 rows in the steady state
    guess_set_size    G: n-grams kept for each first token, the latest; all of them are guesses
    max_keys          most first tokens of one request's n-grams
    pool_from_prompt  n-grams of the text itself are guesses too: of the prompt and of the answer
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = ("max_keys", "pool_from_prompt")

    ngram: int = 5
    window: int = 7
    guess_set_size: int = 7
    max_keys: int = 65536
    pool_from_prompt: bool = False

    def __post_init__(self) -> None:
        require_whole("ngram", self.ngram, 3, 64)
        for field in ("window", "guess_set_size", "max_keys"):
            require_whole(field, getattr(self, field), 1)
        require_probe_fits(self.ngram, self.window)
        require_switches(self, "pool_from_prompt")


# As its authors measured a 7B model on an A100.
PAPER = {"window": 15, "guess_set_size": 15}


class _Request:
    """Window, n-grams and the last tokens of one request."""

    __slots__ = ("_learns_text", "_ngrams", "_tail", "committed_len", "window")

    def __init__(self, options: LookaheadOptions, request: DraftRequest) -> None:
        self._learns_text = options.pool_from_prompt
        # N-grams of one length: none begins another, and so the dictionary is Lookahead's pool.
        self._ngrams = ForwardDictionary(options.guess_set_size, options.max_keys)
        self._tail: deque[int] = deque(maxlen=options.ngram)
        self.committed_len = 0
        self._extend(request.token_ids.tolist())
        self.window: CandidatePool | None = None
        if self.committed_len:
            rng = np.random.default_rng(request.seed)
            self.window = CandidatePool(options.ngram, options.window, request.token_ids, rng)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the n-grams; the window is small and does not grow."""
        return self._ngrams.memory_bytes

    def guesses(self, assumed: Sequence[int]) -> Iterable[Sequence[int]]:
        """What followed the last of the tokens that are assumed, or of the text, the latest
        first."""
        return self._ngrams.continuations(assumed[-1] if assumed else self._tail[-1])

    def observe(self, commit: Commit) -> None:
        """The window's n-grams come first, so that the text has the last word."""
        if self.window is not None and commit.probe_ids is not None:
            predicted = commit.probe_ids[:, 0].tolist()
            for ngram in self.window.advance(self._tail[-1], predicted):
                self._ngrams.add(ngram[0], ngram[1:])
        self._extend(commit.tokens.tolist())

    def _extend(self, tokens: Iterable[int]) -> None:
        """Append to the text; where it is learned, the n-gram that ends at each new token."""
        for token in tokens:
            self._tail.append(token)
            self.committed_len += 1
            if self._learns_text and len(self._tail) == self._tail.maxlen:
                first, *rest = self._tail
                self._ngrams.add(first, tuple(rest))


class LookaheadDrafter(StatefulDrafter[_Request]):
    """Proposes the n-grams that begin with the last token, the latest first, and probes for more.

    The window takes the target's most probable tokens, whatever the request's temperature is.
    """

    def __init__(self, name: str = "lookahead", options: LookaheadOptions | None = None) -> None:
        super().__init__(name)
        self._options = options or LookaheadOptions()

    def _state(self, request: DraftRequest) -> _Request:
        return _Request(self._options, request)

    def _learn(self, state: _Request, commit: Commit) -> None:
        state.observe(commit)

    def _propose(self, state: _Request, query: Query) -> Proposal:
        trie = ProposalTrie(query.max_nodes)
        trie.add_all(state.guesses(query.assumed or ()))
        # Where no nodes are wanted every row of the step is dear: no probe either.
        probes = query.max_nodes > 0 and not query.assumed
        probe = state.window.probe(top_k=1) if probes and state.window else None
        return trie.proposal(self._name, probe)
