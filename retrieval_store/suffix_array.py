"""Sorts all positions of a text by the tokens that follow them, in vectorised numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..core.types import Int64


def sort_suffixes(text: NDArray[np.uint32], depth: int) -> NDArray[np.uint32]:
    """Positions of `text` [n], sorted by the next `depth` tokens, equal ones by position.

    `depth` is a power of two; the end of the text sorts before every token. Prefix doubling
    (Manber and Myers 1990), stopped at `depth`: log2(depth) sorts of int64 keys. The result does
    not depend on the machine's sorting algorithm.
    """
    rank = _dense_ranks(text.astype(np.int64))
    width = 1
    while width < depth and rank.max(initial=0) + 1 < len(rank):
        rank = _dense_ranks(_pair_keys(rank, width))
        width *= 2
    keys = rank * len(rank) + np.arange(len(rank))
    keys.sort()
    return (keys % max(len(rank), 1)).astype(np.uint32)


def common_prefix_lens(
    text: NDArray[np.uint32], suffixes: NDArray[np.uint32], depth: int
) -> NDArray[np.uint8]:
    """uint8 [n]: tokens that suffix i shares with suffix i - 1, at most `depth`; 0 for i = 0."""
    lens = np.zeros(len(suffixes), dtype=np.uint8)
    alive = np.arange(1, len(suffixes))
    for offset in range(depth):
        left = suffixes[alive - 1].astype(np.int64) + offset
        right = suffixes[alive].astype(np.int64) + offset
        inside = np.maximum(left, right) < len(text)
        alive, left, right = alive[inside], left[inside], right[inside]
        alive = alive[text[left] == text[right]]
        lens[alive] += 1
    return lens


def _pair_keys(rank: Int64, width: int) -> Int64:
    """Keys that sort positions by 2 * width tokens, from their ranks by `width` tokens."""
    follower = np.zeros_like(rank)
    follower[:-width] = rank[width:] + 1
    return rank * (len(rank) + 1) + follower


def _dense_ranks(keys: Int64) -> Int64:
    order = np.argsort(keys)
    ordered = keys[order]
    steps = np.zeros(len(keys), dtype=np.int64)
    steps[1:] = ordered[1:] != ordered[:-1]
    ranks = np.empty_like(steps)
    ranks[order] = np.cumsum(steps)
    return ranks
