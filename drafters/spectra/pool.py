"""The compiled loops of SPECTRA's candidate pool: one array a request.

It is the window of `ngram/lookahead.py`, which says what levels and columns are. The array is
int32: how many LEVELS there are, how many COLUMNS each has, and then the levels, each with room for
the columns of the first step. Column 0 of level 0 is the root, which is not kept.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Bool, Int32, Int64
from ...core.compiled import compiled, int32_at
from ..ngram.ngram_maps import NONE, NgramMap, find

LEVELS, COLUMNS, CELLS = range(3)


def first_pool(ngram: int, window: int, level: Int32) -> Int32:
    """A pool of one level, of which column 0 is left out: int32 [window + ngram - 3]."""
    num_columns = window + ngram - 2
    pool = np.empty(CELLS + (ngram - 1) * num_columns, dtype=np.int32)
    pool[LEVELS], pool[COLUMNS] = 1, num_columns
    pool[CELLS + 1 : CELLS + num_columns] = level
    return pool


@compiled
def _cells(pool: Int32, ngram: int) -> Int32:
    """int32 [most levels, most columns]."""
    return pool[CELLS:].reshape(ngram - 1, (len(pool) - CELLS) // (ngram - 1))


@compiled
def probe_all(addresses: Int64, sizes: Int64, ngram: int) -> tuple[Int32, Int64]:
    """The tokens of the pools' probes, one behind the other, level by level; where each ends."""
    tokens = np.empty(sizes.sum(), dtype=np.int32)
    ends = np.empty(len(addresses), dtype=np.int64)
    count = 0
    for place in range(len(addresses)):
        ends[place] = count
        if not sizes[place]:
            continue
        pool = int32_at(addresses[place], sizes[place])
        cells = _cells(pool, ngram)
        for level in range(pool[LEVELS]):
            for column in range(level == 0, pool[COLUMNS]):
                tokens[count] = cells[level, column]
                count += 1
        ends[place] = count
    return tokens[:count], ends


@compiled
def refine(forward: NgramMap, best: Int32, explore: Bool) -> Int32:
    """The target's best token after each wanted row; the best that begins no n-gram yet, if there
    is one, where that is explored.

    best     int32 [rows, top_k]
    explore  bool [rows]
    """
    refined = best[:, 0].copy()
    for row in range(len(best)):
        if explore[row]:
            for place in range(best.shape[1]):
                if find(forward, best[row, place : place + 1]) == NONE:
                    refined[row] = best[row, place]
                    break
    return refined


@compiled
def advance(pool: Int32, ngram: int, root: int, predicted: Int32) -> Int32:
    """Take the target's token after each wanted row. Gives the completed n-grams, int32 [n, ngram].

    `root` is the last committed token that the probe was computed with.
    """
    cells = _cells(pool, ngram)
    num_levels, num_columns = pool[LEVELS], pool[COLUMNS]
    if num_levels == ngram - 1:
        ngrams = np.empty((num_columns, ngram), dtype=np.int32)
        cells[0, 0] = root
        for column in range(num_columns):
            for level in range(num_levels):
                ngrams[column, level] = cells[level, column]
            ngrams[column, num_levels] = predicted[column]
        for level in range(num_levels - 1):
            cells[level, :num_columns] = cells[level + 1, :num_columns]
        cells[num_levels - 1, :num_columns] = predicted
        return ngrams
    # A column goes. The root is no row of its own probe, so its first predictions lack column 0.
    for level in range(num_levels):
        for column in range(num_columns - 1):
            cells[level, column] = cells[level, column + 1]
    cells[num_levels, : num_columns - 1] = predicted[len(predicted) - num_columns + 1 :]
    pool[LEVELS], pool[COLUMNS] = num_levels + 1, num_columns - 1
    return np.empty((0, ngram), dtype=np.int32)
