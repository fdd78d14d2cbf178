"""SPECTRA-CORE: speculation from the request's own n-grams and the target's own predictions.

Le et al., ACL 2025 (2025.acl-long.685), section 4.2.1. Guesses come from a forward and a backward
dictionary of n-grams; these learn from the text and from a pool of candidate sequences that the
target extends beside every step (`Probe`). Needs no training. Formulas, and differences from the
paper: docs/algorithms/drafters.md, "SPECTRA".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ...core.arrays import Int32
from ...core.errors import ConfigError
from ...core.proposals import Commit, DraftRequest, Proposal
from ...core.tree.merge import ProposalTrie
from ..open_requests import StatefulDrafter
from ..option_checks import require_fraction, require_switches, require_whole
from .candidate_pool import CandidatePool, require_probe_fits
from .ngram_dictionaries import BackwardDictionary, ForwardDictionary


@dataclass(frozen=True, slots=True, kw_only=True)
class SpectraOptions:
    """Options of `SpectraDrafter`; raises `ConfigError` naming the option.

    ngram             N: longest n-gram; forward guesses have up to N-1 tokens
    window            W: columns of the pool; a probe has (N-1) W - 1 rows in the steady state
    max_guesses       G: most guesses of one step, the backward one first
    guess_len         most tokens of the backward guess; 0 is N-1, as in the paper
    capacity          continuations kept for each token
    max_keys          most keys of each dictionary, of one request
    refine_threshold  r_th, compared with a random number for each prediction of the pool
    explore_when      "lt" or "gt": explore if the random number is below or above r_th; the paper's
                      text and listing disagree, "lt" accepted more in our greedy measurements
    explore_top_k     when exploring: the best of so many predictions that begins no n-gram yet
    seed_from_prompt  learn the prompt's n-grams
    learn_committed   learn the generated text's n-grams
    sub_ngrams        learn also the n-grams' prefixes, of 2 to N-1 tokens
    all_offsets       learn the pool's n-grams from every start, not only from the first token
    forward, backward, pool   use that part at all
    """

    ngram: int = 5
    window: int = 3
    max_guesses: int = 15
    guess_len: int = 16
    capacity: int = 15
    max_keys: int = 65536
    refine_threshold: float = 0.1
    explore_when: str = "lt"
    explore_top_k: int = 8
    seed_from_prompt: bool = True
    learn_committed: bool = True
    sub_ngrams: bool = True
    all_offsets: bool = False
    forward: bool = True
    backward: bool = True
    pool: bool = True

    def __post_init__(self) -> None:
        require_whole("ngram", self.ngram, 3, 64)
        require_whole("guess_len", self.guess_len, 0, 1024)
        for field in ("window", "max_guesses", "capacity", "max_keys", "explore_top_k"):
            require_whole(field, getattr(self, field), 1)
        require_fraction("refine_threshold", self.refine_threshold)
        require_switches(self, "seed_from_prompt", "learn_committed", "sub_ngrams", "all_offsets")
        require_switches(self, "forward", "backward", "pool")
        if self.pool:
            require_probe_fits(self.ngram, self.window)
        if self.explore_when not in ("lt", "gt"):
            raise ConfigError("explore_when", f"must be 'lt' or 'gt', not {self.explore_when!r}")


class _Request:
    """Dictionaries, pool and the last tokens of one request."""

    __slots__ = ("_backward", "_forward", "_options", "_seed", "_tail", "committed_len", "pool")

    def __init__(self, options: SpectraOptions, request: DraftRequest) -> None:
        self._options = options
        self._seed = request.seed
        self._forward = ForwardDictionary(options.capacity, options.max_keys)
        self._backward = BackwardDictionary(options.max_keys)
        self._tail: deque[int] = deque(maxlen=options.ngram)
        self.committed_len = 0
        self._extend(request.token_ids[: request.prompt_len].tolist(), options.seed_from_prompt)
        self._extend(request.token_ids[request.prompt_len :].tolist(), options.learn_committed)
        self.pool: CandidatePool | None = None
        if options.pool and self.committed_len:
            self.pool = CandidatePool(
                options.ngram, options.window, request.token_ids, self._rng(0)
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of the dictionaries; the pool is small and does not grow."""
        return self._forward.memory_bytes + self._backward.memory_bytes

    def guesses(self) -> Iterator[Sequence[int]]:
        """At most `max_guesses`, the most promising first."""
        return islice(self._all_guesses(), self._options.max_guesses)

    def _all_guesses(self) -> Iterator[Sequence[int]]:
        options = self._options
        if options.backward:
            key_len = options.ngram - 1
            guess_len = options.guess_len or key_len
            guess = self._backward.guess(tuple(self._tail), key_len, guess_len)
            if guess:
                yield guess
        if options.forward:
            yield from self._forward.continuations(self._tail[-1])

    def observe(self, commit: Commit) -> None:
        """The pool's n-grams come first, so that the text has the last word."""
        if self.pool is not None and commit.probe_ids is not None:
            for ngram in self.pool.advance(self._tail[-1], self._refine(commit.probe_ids)):
                starts = range(len(ngram) - 1) if self._options.all_offsets else (0,)
                for start in starts:
                    self._learn_prefixes(ngram[start:])
        self._extend(commit.tokens.tolist(), self._options.learn_committed)

    def _refine(self, probe_ids: Int32) -> list[int]:
        """The target's best token after each wanted row; sometimes its best unknown one."""
        draws = self._rng(self.committed_len).random(len(probe_ids))
        below = self._options.explore_when == "lt"
        explore = (draws < self._options.refine_threshold) == below
        return [
            next((token for token in best if token not in self._forward), best[0])
            if exploring
            else best[0]
            for best, exploring in zip(probe_ids.tolist(), explore.tolist(), strict=True)
        ]

    def _extend(self, tokens: Iterable[int], learn: bool) -> None:
        """Append to the text, learning every n-gram that ends at a new token."""
        for token in tokens:
            self._tail.append(token)
            self.committed_len += 1
            if learn:
                tail = tuple(self._tail)
                for length in self._lengths(len(tail)):
                    self._learn(tail[-length:])

    def _learn_prefixes(self, ngram: tuple[int, ...]) -> None:
        for length in self._lengths(len(ngram)):
            self._learn(ngram[:length])

    def _lengths(self, longest: int) -> range:
        """Lengths of the n-grams to learn, up to `longest`."""
        return range(2 if self._options.sub_ngrams else self._options.ngram, longest + 1)

    def _learn(self, ngram: tuple[int, ...]) -> None:
        self._forward.add(ngram[0], ngram[1:])
        self._backward.add(ngram[:-1], ngram[-1])

    def _rng(self, committed_len: int) -> np.random.Generator:
        """Repeats for a request's seed; never part of the sampling noise."""
        return np.random.default_rng([self._seed, committed_len])


class SpectraDrafter(StatefulDrafter[_Request]):
    """Proposes the guesses of both dictionaries as one tree, and probes for the pool."""

    def __init__(self, name: str = "spectra", options: SpectraOptions | None = None) -> None:
        super().__init__(name)
        self._options = options or SpectraOptions()

    def _state(self, request: DraftRequest) -> _Request:
        return _Request(self._options, request)

    def _learn(self, state: _Request, commit: Commit) -> None:
        state.observe(commit)

    def _propose(self, state: _Request, max_nodes: int) -> Proposal:
        trie = ProposalTrie(max_nodes)
        trie.add_all(state.guesses())
        probe = None
        # Where no nodes are wanted every row of the step is dear: no probe either.
        if state.pool is not None and max_nodes > 0:
            probe = state.pool.probe(self._options.explore_top_k)
        return trie.proposal(self._name, probe)
