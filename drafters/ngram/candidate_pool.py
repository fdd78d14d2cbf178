"""A window of guessed tokens that the target extends at every step.

It is that of Lookahead decoding (Fu et al. 2024, `hao-ai-lab/LookaheadDecoding`), which SPECTRA
calls its candidate pool: W columns and N-1 levels. Level 0 of column 0 is the root itself. The
token of column c and level l stands l + c positions after the root and sees the root, level 0 of
the columns up to c, and the lower levels of its own column. What the target predicts at the highest
level completes W n-grams. Worked example: docs/drafters.md, "Lookahead".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ...core.arrays import Bool, Int32
from ...core.errors import ConfigError, DrafterError
from ...core.proposals import MAX_PROBE_ROWS, Probe

Ngram = tuple[int, ...]


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
