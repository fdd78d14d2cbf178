"""Lookahead decoding: n-grams that the target itself makes beside every step.

Fu et al. 2024 (arXiv 2402.02057), `hao-ai-lab/LookaheadDecoding`. A window of guessed tokens runs
through the target as a `Probe`, in Jacobi iterations; what comes out at its far end completes
n-grams, and those that begin with the last committed token are the guesses. Needs no training.

The window, which SPECTRA calls its candidate pool, has W columns and N-1 levels. Level 0 of column
0 is the root itself. The token of column c and level l stands l + c positions after the root and
sees the root, level 0 of the columns up to c, and the lower levels of its own column. What the
target predicts at the highest level completes W n-grams. Worked example, and differences from the
paper's code: docs/drafters.md, "Lookahead".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from ...core.arrays import Bool, Int32
from ...core.errors import ConfigError, DrafterError
from ...core.proposals import MAX_PROBE_ROWS, Commit, DraftRequest, Probe, Proposal, Query
from ...core.tree.merge import ProposalTrie
from ..open_requests import StatefulDrafter
from ..option_checks import require_switches, require_whole

Ngram = tuple[int, ...]
# About what an n-gram takes in a dictionary: its slot there, its tuple, and its tokens.
NGRAM_BYTES = 120
# About what a dictionary takes in another one.
INNER_BYTES = 260
# As its authors measured a 7B model on an A100.
PAPER = {"window": 15, "guess_set_size": 15}


def require_probe_fits(ngram: int, window: int) -> None:
    """Raise `ConfigError` if a window of this size would probe with more rows than it may."""
    num_rows = max(levels * (window + ngram - 1 - levels) - 1 for levels in range(1, ngram))
    if num_rows > MAX_PROBE_ROWS:
        raise ConfigError(
            "window",
            f"probes with up to {num_rows} rows at ngram {ngram}, and a step has {MAX_PROBE_ROWS} "
            "for them; choose a smaller window or ngram",
        )


class CandidatePool:
    """The window of one request, from its first random level to the steady state.

    It begins with one level that is N-2 columns too wide; each of N-2 warm-up steps adds a level
    and drops a column. `advance` moves it by one step; a step whose probe was dropped leaves it as
    it is, since nothing in it depends on the root.
    """

    __slots__ = ("_levels", "_max_levels")

    def __init__(self, ngram: int, window: int, prompt: Int32, rng: np.random.Generator) -> None:
        self._max_levels = ngram - 1
        # Level 0 lacks column 0, which is the root; every other level has all columns.
        self._levels: list[list[int]] = [rng.choice(prompt, window + ngram - 3).tolist()]

    @property
    def num_wanted(self) -> int:
        """Number of the probe's rows whose predictions `advance` takes."""
        return len(self._levels[-1])

    def probe(self, top_k: int) -> Probe:
        """The window's rows, level by level; the wanted ones are the highest level."""
        tokens = np.array([token for level in self._levels for token in level], dtype=np.int32)
        offsets, mask, wanted = probe_layout(len(self._levels[0]) + 1, len(self._levels))
        return Probe(tokens, offsets, mask, wanted, top_k)

    def advance(self, root: int, predicted: Sequence[int]) -> list[Ngram]:
        """Take the target's token after each of the `num_wanted` rows. Returns completed n-grams.

        `root` is the last committed token that the probe was computed with. Raises `DrafterError`
        for predictions of another number of rows.
        """
        if len(predicted) != self.num_wanted:
            raise DrafterError(
                f"{len(predicted)} probe answers came, {self.num_wanted} were wanted"
            )
        columns = zip([root, *self._levels[0]], *self._levels[1:], strict=True)
        if len(self._levels) == self._max_levels:
            ngrams = [(*column, token) for column, token in zip(columns, predicted, strict=True)]
            self._levels = [self._levels[1][1:], *self._levels[2:], list(predicted)]
            return ngrams
        # The root is no row of its own probe, so the first prediction already lacks column 0.
        top = list(predicted) if len(self._levels) == 1 else list(predicted[1:])
        self._levels = [*(level[1:] for level in self._levels), top]
        return []


@lru_cache(maxsize=64)
def probe_layout(num_columns: int, num_levels: int) -> tuple[Int32, Bool, Int32]:
    """Offsets int32 [n], mask bool [n, n], and rows of the highest level, int32 [w], of a probe."""
    level, column = np.divmod(
        np.arange(1, num_columns * num_levels, dtype=np.int32), np.int32(num_columns)
    )
    in_level_0 = (level == 0) & (column <= column[:, None])
    in_own_column = (column == column[:, None]) & (level <= level[:, None])
    mask = in_level_0 | in_own_column
    wanted = np.flatnonzero(level == num_levels - 1).astype(np.int32)
    offsets = level + column
    for shared in (offsets, mask, wanted):
        shared.flags.writeable = False
    return offsets, mask, wanted


class ForwardDictionary:
    """Continuations of each token, of which the latest `capacity` are kept, for `max_keys` tokens.

    Of a continuation and its prefix only the longer one is kept: in a trie of guesses it says both.
    """

    __slots__ = ("_by_token", "_capacity", "_max_keys", "_num_kept")

    def __init__(self, capacity: int, max_keys: int) -> None:
        self._capacity = capacity
        self._max_keys = max_keys
        self._num_kept = 0
        # Dicts used as ordered sets: the latest last, in both levels.
        self._by_token: dict[int, dict[Ngram, None]] = {}

    def __contains__(self, token: int) -> bool:
        return token in self._by_token

    @property
    def memory_bytes(self) -> int:
        """About the bytes of keys and continuations."""
        return len(self._by_token) * INNER_BYTES + self._num_kept * NGRAM_BYTES

    def add(self, token: int, continuation: Ngram) -> None:
        """Make it the latest continuation of `token`."""
        kept = self._by_token.pop(token, None)
        if kept is None:
            kept = {}
            if len(self._by_token) == self._max_keys:
                self._num_kept -= len(self._by_token.pop(next(iter(self._by_token))))
        self._by_token[token] = kept
        self._num_kept -= len(kept)
        prefix = continuation[:-1]
        if prefix in kept:
            # Nothing kept is a prefix of another, so nothing else begins with this one.
            del kept[prefix]
        else:
            known = _beginning_with(continuation, kept)
            if known is not None:
                continuation = known
                del kept[known]
            elif len(kept) == self._capacity:
                del kept[next(iter(kept))]
        kept[continuation] = None
        self._num_kept += len(kept)

    def continuations(self, token: int) -> Iterator[Ngram]:
        """The continuations of `token`, the latest first."""
        return reversed(self._by_token.get(token, {}))


def _beginning_with(prefix: Ngram, kept: dict[Ngram, None]) -> Ngram | None:
    """The latest of `kept` that begins with `prefix`; a plain loop, since prompts are long."""
    if prefix in kept:
        return prefix
    length = len(prefix)
    for known in reversed(kept):
        if known[:length] == prefix:
            return known
    return None


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
