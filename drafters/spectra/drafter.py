"""SPECTRA-CORE: speculation from the request's own n-grams and the target's own predictions.

Le et al., ACL 2025 (2025.acl-long.685), section 4.2.1. Guesses come from a forward and a backward
dictionary of n-grams; these learn from the text and from a pool of candidate sequences that the
target extends beside every step (`Probe`). Needs no training. Formulas, and differences from the
paper: docs/drafters.md, "SPECTRA".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.arrays import Bool, Int32, Int64
from ...core.compiled import address_of
from ...core.errors import DrafterError
from ...core.proposals import MAX_PROBE_ROWS, Commit, DraftRequest, Probe
from ...core.sampling import uniform
from ...core.tree.proposal_batch import ProposalBatch
from ..ngram.lookahead import probe_layout, require_probe_fits
from ..ngram.ngram_maps import NONE, ORDER_LEN, VACANT, empty_map, fill_table
from ..open_requests import PIECE_LEN, AssumedTokens, BatchedDrafter
from ..option_checks import require_fraction, require_switches, require_whole
from .pool import COLUMNS, LEVELS, first_pool, probe_all
from .tables import (
    BACKWARD,
    CONTINUATIONS,
    CURSOR,
    FORWARD,
    FREE,
    POOL,
    POOL_SIZE,
    TAIL,
    USED,
    guess_all,
    learn_all,
)
from .tables import PATH as CONTINUATION_HEAD

# As in the paper's listing, where only the pool feeds the dictionaries.
PAPER = {
    "window": 15,
    "guess_len": 0,
    "forward_first": True,
    "explore_top_k": MAX_PROBE_ROWS,
    "seed_from_prompt": False,
    "learn_committed": False,
    "keep_prefixes": True,
}
# N-grams that a request's arrays first have room for.
FIRST_ROOM = 256
# Keeps the pool's random numbers apart from the sampling noise.
POOL_SALT = 0x5350454354524131
NO_ANSWERS = np.empty((0, 1), dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpectraOptions:
    """Options of `SpectraDrafter`; raises `ConfigError` naming the option.

    Where the paper has another value, `PAPER` has it.

    ngram             N: longest n-gram; forward guesses have up to N-1 tokens
    window            W: columns of the pool; a probe has (N-1) W - 1 rows in the steady state
    max_guesses       G: most guesses of one step
    forward_first     the backward guess comes last, as in the paper's listing; off: first
    guess_len         most tokens of the backward guess; 0 is N-1, as in the paper
    capacity          continuations kept for each token
    max_keys          most keys of each dictionary, of one request
    refine_threshold  r_th: a prediction of the pool explores if a random number is below it, as in
                      the paper's text; its listing explores above it
    explore_top_k     when exploring: the best of so many predictions that begins no n-gram yet; the
                      paper's are the whole vocabulary
    seed_from_prompt  learn the prompt's n-grams
    learn_committed   learn the generated text's n-grams
    sub_ngrams        learn also the n-grams' prefixes, of 2 to N-1 tokens
    keep_prefixes     a continuation and its prefixes are guesses of their own; off: the longest one
    all_offsets       learn the pool's n-grams from every start, not only from the first token
    forward, backward, pool   use that part at all
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = (
        "max_guesses",
        "forward_first",
        "capacity",
        "max_keys",
        "refine_threshold",
        "explore_top_k",
        "seed_from_prompt",
        "learn_committed",
        "sub_ngrams",
        "keep_prefixes",
        "all_offsets",
        "forward",
        "backward",
    )
    ngram: int = 5
    window: int = 3
    max_guesses: int = 15
    forward_first: bool = False
    guess_len: int = 16
    capacity: int = 15
    max_keys: int = 65536
    refine_threshold: float = 0.1
    explore_top_k: int = 8
    seed_from_prompt: bool = True
    learn_committed: bool = True
    sub_ngrams: bool = True
    keep_prefixes: bool = False
    all_offsets: bool = False
    forward: bool = True
    backward: bool = True
    pool: bool = True

    def __post_init__(self) -> None:
        require_whole("ngram", self.ngram, 3, 64)
        require_whole("guess_len", self.guess_len, 0, 1024)
        for field in ("window", "max_guesses", "capacity", "max_keys"):
            require_whole(field, getattr(self, field), 1)
        require_whole("explore_top_k", self.explore_top_k, 1, MAX_PROBE_ROWS)
        require_fraction("refine_threshold", self.refine_threshold)
        require_switches(self, "seed_from_prompt", "learn_committed", "sub_ngrams", "all_offsets")
        require_switches(self, "keep_prefixes", "forward_first", "forward", "backward", "pool")
        if self.pool:
            require_probe_fits(self.ngram, self.window)


class _Request:
    """Dictionaries and pool of one request.

    row   of their arrays as the compiled loops take them; another one after `reserve`
    pool  of `pool.py`; of no number where there is none
    """

    __slots__ = ("_arrays", "_num_pending", "_options", "_room", "committed_len", "pool", "row",
                 "seed")  # fmt: skip

    def __init__(self, options: SpectraOptions, request: DraftRequest) -> None:
        self._options = options
        self.seed = request.seed
        self.committed_len = 0
        cursor = np.zeros(TAIL + options.ngram, dtype=np.int64)
        cursor[[VACANT, ORDER_LEN + VACANT, FREE]] = NONE
        self._num_pending = 0
        self.pool = np.empty(0, dtype=np.int32)
        if options.pool and len(request.token_ids):
            rng = np.random.default_rng([request.seed, 0])
            level = rng.choice(request.token_ids, options.window + options.ngram - 3)
            self.pool = first_pool(options.ngram, options.window, level)
        self._hold(_empty_arrays(options, FIRST_ROOM), cursor)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the dictionaries; the pool is small and does not grow."""
        return sum(array.nbytes for array in self._arrays)

    def reserve(self, count: int, num_pooled: int = 0) -> None:
        """Count tokens as committed, and make room for what they and pooled n-grams teach."""
        self.committed_len += count
        starts = self._options.ngram - 1 if self._options.all_offsets else 1
        self._num_pending += (count + num_pooled * starts) * (self._options.ngram - 1)
        if self._num_pending > self._room:
            self._room = self._num_free()
            if self._num_pending > self._room:
                self._grow()

    def settle(self) -> None:
        """What room was made for is learned."""
        self._room -= self._num_pending
        self._num_pending = 0

    def answers(self, commit: Commit) -> Int32:
        """The answers to the pool's probe, int32 [wanted rows, top k]; no rows where it had none.

        Raises `DrafterError` for answers to another number of rows.
        """
        if commit.probe_ids is None or not len(self.pool):
            return NO_ANSWERS
        levels, columns = self.pool[[LEVELS, COLUMNS]].tolist()
        num_wanted = columns - (levels == 1)
        if len(commit.probe_ids) != num_wanted:
            raise DrafterError(
                f"{len(commit.probe_ids)} probe answers came, {num_wanted} were wanted"
            )
        return commit.probe_ids

    def _num_free(self) -> int:
        """N-grams that there is room for, however many of them are new."""
        arrays, keys = self._arrays, self._options.max_keys
        cursor = arrays[CURSOR]
        free = len(arrays[CONTINUATIONS]) - int(cursor[USED])
        for entries, used in ((arrays[FORWARD], cursor[0]), (arrays[BACKWARD], cursor[ORDER_LEN])):
            # A map of so many keys forgets one for every new one.
            if len(entries) < keys:
                free = min(free, len(entries) - int(used))
        return free

    def _grow(self) -> None:
        """Go on in larger arrays."""
        old = self._arrays
        room = len(old[CONTINUATIONS]) - self._room + self._num_pending
        new = _empty_arrays(self._options, 3 * room // 2)
        for column in (FORWARD, BACKWARD, CONTINUATIONS):
            new[column][: len(old[column])] = old[column]
        self._hold(new, old[CURSOR])

    def _hold(self, arrays: list[np.ndarray], cursor: Int64) -> None:
        """Go on in these arrays, whose tables are empty."""
        options = self._options
        self._arrays = [*arrays, self.pool, cursor]
        for first, order in ((FORWARD, cursor[:ORDER_LEN]), (BACKWARD, cursor[ORDER_LEN:USED])):
            entries, table, queue = arrays[first : first + 3]
            fill_table((entries, table, order, queue))
        self._room = self._num_free()
        self.row = (
            *map(address_of, self._arrays), *map(len, arrays), len(self.pool),
            options.ngram, options.capacity, options.max_keys,
            2 if options.sub_ngrams else options.ngram, int(options.keep_prefixes),
        )  # fmt: skip


def _empty_arrays(options: SpectraOptions, room: int) -> list[np.ndarray]:
    """All arrays but pool and cursor, in the order of a row's columns, for so many n-grams."""
    keys, longest = min(room, options.max_keys), options.ngram - 1
    continuations = np.empty((room, CONTINUATION_HEAD + longest), dtype=np.int32)
    return [
        *empty_map(1, 3, keys, options.max_keys),
        *empty_map(longest, 1, keys, options.max_keys),
        continuations,
    ]


class SpectraDrafter(BatchedDrafter[_Request]):
    """Proposes the guesses of both dictionaries as one tree, and probes for the pool."""

    def __init__(self, name: str = "spectra", options: SpectraOptions | None = None) -> None:
        super().__init__(name)
        self._options = options = options or SpectraOptions()
        guess_len = (options.guess_len or options.ngram - 1) if options.backward else 0
        settings = options.max_guesses, guess_len, options.forward, options.forward_first
        self._settings = np.array(settings, dtype=np.int64)
        # Compiles the loops, or reads them from disk, before a request waits for them.
        first = _Request(options, DraftRequest("", np.zeros(1, dtype=np.int32), 1, 0.0, 0))
        for _ in range(2):
            first.reserve(FIRST_ROOM)
            self._extend_all([first], [np.zeros(FIRST_ROOM, dtype=np.int32)])
        self._propose_all([first], [1], AssumedTokens.none(1))

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
                self._learn_all([state], [NO_ANSWERS], [piece], is_learned)
        self._requests.put(request.request_id, state)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn what was committed. Raises `DrafterError` for a commit that does not fit; those
        before it are learned."""
        batch: dict[int, tuple[_Request, Int32, Int32]] = {}
        try:
            for commit in commits:
                state = self._requests.of_commit(commit)
                if id(state) in batch:
                    self._learn_batch(batch)
                answers = state.answers(commit)
                state.reserve(len(commit.tokens), self._options.window if len(answers) else 0)
                batch[id(state)] = (state, answers, commit.tokens)
        finally:
            self._learn_batch(batch)

    def _learn_batch(self, batch: dict[int, tuple[_Request, Int32, Int32]]) -> None:
        if batch:
            states, answers, tokens = zip(*batch.values(), strict=True)
            self._learn_all(states, answers, tokens, self._options.learn_committed)
        batch.clear()

    def _learn_all(
        self,
        states: Sequence[_Request],
        answers: Sequence[Int32],
        tokens: Sequence[Int32],
        is_learned: bool,
    ) -> None:
        """The pools' n-grams come first, so that the text has the last word."""
        num_tokens = list(map(len, tokens))
        shapes = np.array([own.shape for own in answers], dtype=np.int64)
        has_answers = shapes[:, 0].any()
        learn_all(
            _rows(states),
            np.concatenate([own.ravel() for own in answers]) if has_answers else NO_ANSWERS[:, 0],
            shapes,
            self._explored(states, num_tokens, shapes),
            np.concatenate(tokens),
            np.array(num_tokens, dtype=np.int64).cumsum(),
            np.array([self._options.all_offsets, is_learned], dtype=np.int64),
        )
        for state in states:
            state.settle()

    def _explored(
        self, states: Sequence[_Request], num_tokens: Sequence[int], shapes: Int64
    ) -> Bool:
        """bool, of each answer: whether an unknown token is taken instead of the best.

        That follows from the request's seed and the place of its text's end.
        """
        num_rows = shapes[:, 0]
        total = int(num_rows.sum())
        if not total:
            return np.empty(0, dtype=np.bool_)
        ends = [
            state.committed_len - count for state, count in zip(states, num_tokens, strict=True)
        ]
        seeds = np.array([state.seed ^ POOL_SALT for state in states], dtype=np.int64)
        index = np.arange(total) - (num_rows.cumsum() - num_rows).repeat(num_rows)
        positions = np.array(ends, dtype=np.int64).repeat(num_rows)
        draws = uniform(seeds.repeat(num_rows), positions, index)
        return draws < self._options.refine_threshold

    def _state(self, request: DraftRequest) -> _Request:
        return _Request(self._options, request)

    def _extend_all(self, states: Sequence[_Request], tokens: Sequence[Int32]) -> None:
        self._learn_all(states, [NO_ANSWERS] * len(states), tokens, self._options.learn_committed)

    def _propose_all(
        self, states: Sequence[_Request], max_nodes: Sequence[int], assumed: AssumedTokens
    ) -> ProposalBatch:
        limits = np.array(max_nodes, dtype=np.int64)
        rows = _rows(states)
        guesses = guess_all(rows, limits, *assumed, self._settings)
        # Where no nodes are wanted every row of the step is dear: no probe either.
        is_wanted = limits > 0
        if assumed.places:
            is_wanted[assumed.places] = False
        return ProposalBatch(self._name, *guesses, self._probes(states, rows, is_wanted))

    def _probes(
        self, states: Sequence[_Request], rows: Int64, is_wanted: Bool
    ) -> Sequence[Probe | None]:
        if not self._options.pool:
            return ()
        sizes = np.where(is_wanted, rows[:, POOL_SIZE], 0)
        tokens, ends = probe_all(np.ascontiguousarray(rows[:, POOL]), sizes, self._options.ngram)
        probes: list[Probe | None] = []
        first = 0
        for state, end in zip(states, ends.tolist(), strict=True):
            levels, columns = state.pool[:2].tolist() if end > first else (0, 0)
            layout = probe_layout(columns, levels) if levels else None
            probes.append(
                Probe(tokens[first:end], *layout, self._options.explore_top_k) if layout else None
            )
            first = end
        return probes


def _rows(states: Sequence[_Request]) -> Int64:
    return np.array([state.row for state in states], dtype=np.int64)
