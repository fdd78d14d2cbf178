"""SPECTRA-CORE: speculation from the request's own n-grams and the target's own predictions.

Le et al., ACL 2025 (2025.acl-long.685), section 4.2.1. Guesses come from a forward and a backward
dictionary of n-grams; these learn from the text and from a pool of candidate sequences that the
target extends beside every step (`Probe`). Needs no training. Formulas, and differences from the
paper: docs/algorithms/drafters.md, "SPECTRA".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import address_of
from ...core.errors import ConfigError
from ...core.proposals import Commit, DraftRequest
from ...core.tree.proposal_batch import ProposalBatch
from ..open_requests import PIECE_LEN, BatchedDrafter
from ..option_checks import require_fraction, require_switches, require_whole
from .candidate_pool import CandidatePool, require_probe_fits
from .ngram_maps import NONE, empty_map, fill_table
from .spectra_tables import (
    BACKWARD,
    BACKWARD_TABLE,
    CONTINUATIONS,
    CURSOR,
    FORWARD,
    FORWARD_TABLE,
    FREE,
    PATH,
    TAIL,
    USED,
    guess_all,
    knows,
    learn_all,
)

# N-grams that a request's arrays first have room for.
FIRST_ROOM = 256


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
    """Dictionaries, pool and the last token of one request.

    row  of the dictionaries' arrays as the compiled loops take them; another one after `reserve`
    """

    __slots__ = ("_arrays", "_num_pending", "_room", "_seed", "committed_len", "last_token",
                 "options", "pool", "row")  # fmt: skip

    def __init__(self, options: SpectraOptions, request: DraftRequest) -> None:
        self.options = options
        self._seed = request.seed
        self.committed_len = 0
        self.last_token = 0
        cursor = np.zeros(TAIL + options.ngram, dtype=np.int64)
        cursor[[1, 2, 4, 5, FREE]] = NONE
        self._num_pending = 0
        self._hold(_empty_arrays(options, FIRST_ROOM), cursor)
        self.pool: CandidatePool | None = None
        if options.pool and len(request.token_ids):
            self.pool = CandidatePool(
                options.ngram, options.window, request.token_ids, self._rng(0)
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of the dictionaries; the pool is small and does not grow."""
        return sum(array.nbytes for array in self._arrays)

    def reserve(self, count: int, num_pooled: int = 0) -> None:
        """Count tokens as committed, and make room for what they and pooled n-grams teach."""
        self.committed_len += count
        starts = self.options.ngram - 1 if self.options.all_offsets else 1
        self._num_pending += (count + num_pooled * starts) * (self.options.ngram - 1)
        if self._num_pending > self._room:
            self._room = self._num_free()
            if self._num_pending > self._room:
                self._grow()

    def settle(self) -> None:
        """What room was made for is learned."""
        self._room -= self._num_pending
        self._num_pending = 0

    def completed(self, commit: Commit) -> list[tuple[int, ...]]:
        """The n-grams that the answers to the pool's probe complete; the pool moves on."""
        if self.pool is None or commit.probe_ids is None:
            return []
        return self.pool.advance(self.last_token, self._refine(commit.probe_ids))

    def _num_free(self) -> int:
        """N-grams that there is room for, however many of them are new."""
        arrays, keys = self._arrays, self.options.max_keys
        cursor = arrays[CURSOR]
        free = len(arrays[CONTINUATIONS]) - int(cursor[USED])
        for column, used in ((FORWARD, cursor[0]), (BACKWARD, cursor[3])):
            # A map of so many keys forgets one for every new one.
            if len(arrays[column]) < keys:
                free = min(free, len(arrays[column]) - int(used))
        return free

    def _grow(self) -> None:
        """Go on in larger arrays."""
        old = self._arrays
        room = len(old[CONTINUATIONS]) - self._room + self._num_pending
        new = _empty_arrays(self.options, 3 * room // 2)
        for column in (FORWARD, BACKWARD, CONTINUATIONS):
            new[column][: len(old[column])] = old[column]
        cursor = old[CURSOR]
        fill_table((new[FORWARD], new[FORWARD_TABLE], cursor[:3]))
        fill_table((new[BACKWARD], new[BACKWARD_TABLE], cursor[3:6]))
        self._hold(new, cursor)

    def _hold(self, arrays: list[np.ndarray], cursor: Int64) -> None:
        options = self.options
        self._arrays = [*arrays, cursor]
        self._room = self._num_free()
        self.row = (
            *map(address_of, self._arrays), *map(len, arrays),
            options.ngram, options.capacity, options.max_keys,
            2 if options.sub_ngrams else options.ngram,
        )  # fmt: skip

    def _refine(self, probe_ids: Int32) -> list[int]:
        """The target's best token after each wanted row; sometimes its best unknown one."""
        draws = self._rng(self.committed_len).random(len(probe_ids))
        below = self.options.explore_when == "lt"
        explore = (draws < self.options.refine_threshold) == below
        row = np.array([self.row], dtype=np.int64) if explore.any() else None
        return [
            best[0]
            if row is None or not exploring
            else next((token for token in best if not knows(row, token)), best[0])
            for best, exploring in zip(probe_ids.tolist(), explore.tolist(), strict=True)
        ]

    def _rng(self, committed_len: int) -> np.random.Generator:
        """Repeats for a request's seed; never part of the sampling noise."""
        return np.random.default_rng([self._seed, committed_len])


def _empty_arrays(options: SpectraOptions, room: int) -> list[np.ndarray]:
    """All arrays but the cursor, in the order of a row's columns, for so many n-grams."""
    keys, longest = min(room, options.max_keys), options.ngram - 1
    continuations = np.empty((room, PATH + longest), dtype=np.int32)
    return [*empty_map(1, keys), *empty_map(longest, keys), continuations]


class SpectraDrafter(BatchedDrafter[_Request]):
    """Proposes the guesses of both dictionaries as one tree, and probes for the pool."""

    def __init__(self, name: str = "spectra", options: SpectraOptions | None = None) -> None:
        super().__init__(name)
        self._options = options = options or SpectraOptions()
        guess_len = (options.guess_len or options.ngram - 1) if options.backward else 0
        settings = options.max_guesses, guess_len, int(options.forward)
        self._settings = np.array(settings, dtype=np.int64)
        # Compiles the loops, or reads them from disk, before a request waits for them.
        first = _Request(options, DraftRequest("", np.zeros(1, dtype=np.int32), 1, 0.0, 0))
        for _ in range(2):
            first.reserve(FIRST_ROOM)
            self._extend_all([first], [np.zeros(FIRST_ROOM, dtype=np.int32)])
        self._propose_all([first], [1])
        knows(_rows([first]), 0)

    def open(self, request: DraftRequest) -> None:
        """Begin a request. Raises `DrafterError` if it has no committed token."""
        state = self._state(request)
        for tokens, is_learned in (
            (request.token_ids[: request.prompt_len], self._options.seed_from_prompt),
            (request.token_ids[request.prompt_len :], self._options.learn_committed),
        ):
            for first in range(0, len(tokens), PIECE_LEN):
                piece = tokens[first : first + PIECE_LEN]
                state.reserve(len(piece))
                self._learn_all([state], [[]], [piece], is_learned)
        self._requests.put(request.request_id, state)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn what was committed. Raises `DrafterError` for a commit that does not fit; those
        before it are learned."""
        # The pool's n-grams come first, so that the text has the last word.
        batch: dict[int, tuple[_Request, list[tuple[int, ...]], Int32]] = {}
        try:
            for commit in commits:
                state = self._requests.of_commit(commit)
                if id(state) in batch:
                    self._learn_batch(batch)
                ngrams = state.completed(commit)
                state.reserve(len(commit.tokens), len(ngrams))
                batch[id(state)] = (state, ngrams, commit.tokens)
        finally:
            self._learn_batch(batch)

    def _learn_batch(self, batch: dict[int, tuple[_Request, list[tuple[int, ...]], Int32]]) -> None:
        if batch:
            states, ngrams, tokens = zip(*batch.values(), strict=True)
            self._learn_all(states, ngrams, tokens, self._options.learn_committed)
        batch.clear()

    def _learn_all(
        self,
        states: Sequence[_Request],
        ngrams: Sequence[Sequence[tuple[int, ...]]],
        tokens: Sequence[Int32],
        is_learned: bool,
    ) -> None:
        pooled = list(chain.from_iterable(ngrams))
        learn_all(
            _rows(states),
            np.array(pooled, dtype=np.int32).reshape(-1, self._options.ngram),
            np.array(list(map(len, ngrams)), dtype=np.int64).cumsum(),
            np.concatenate(tokens),
            np.array(list(map(len, tokens)), dtype=np.int64).cumsum(),
            np.array([self._options.all_offsets, is_learned], dtype=np.int64),
        )
        for state, own in zip(states, tokens, strict=True):
            state.settle()
            state.last_token = int(own[-1])

    def _state(self, request: DraftRequest) -> _Request:
        return _Request(self._options, request)

    def _extend_all(self, states: Sequence[_Request], tokens: Sequence[Int32]) -> None:
        self._learn_all(states, [()] * len(states), tokens, self._options.learn_committed)

    def _propose_all(self, states: Sequence[_Request], max_nodes: Sequence[int]) -> ProposalBatch:
        limits = np.array(max_nodes, dtype=np.int64)
        # Where no nodes are wanted every row of the step is dear: no probe either.
        probes = [
            state.pool.probe(self._options.explore_top_k) if state.pool and most else None
            for state, most in zip(states, max_nodes, strict=True)
        ]
        return ProposalBatch(self._name, *guess_all(_rows(states), limits, self._settings), probes)


def _rows(states: Sequence[_Request]) -> Int64:
    return np.array([state.row for state in states], dtype=np.int64)
