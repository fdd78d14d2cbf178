"""Triton kernels that bisect for the threshold of a row's kept tokens; importing needs Triton."""

# Annotations in a kernel are Triton types.
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .filter_kernels import share_of, size_at, weights_of_ranks
from .sampling_kernels import best_of_row, load_logits, ranks_of, shifted

# Above all ranks.
EVERYTHING = tl.constexpr(2**63 - 1)
ALL_IDS = tl.constexpr(2**32 - 1)


@triton.jit
def tally(
    ranks, weights, threshold, logits, row, best, temperature, stride_row, vocab_size, scale,
    IS_GATHERED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, LEN: tl.constexpr,
):  # fmt: skip
    """int64: the number, or the weight, of the tokens with ranks up to `threshold`.

    Counts the gathered tokens in `ranks` and `weights`, or the whole row.
    """
    if IS_GATHERED:
        total = tl.sum(tl.where(ranks <= threshold, weights, 0), axis=0)
    else:
        sums = tl.zeros([LEN], dtype=tl.int64)
        for start in range(0, vocab_size, LEN):
            token_ids = start + tl.arange(0, LEN)
            values = load_logits(logits, row, stride_row, token_ids, vocab_size)
            row_ranks = ranks_of(shifted(values, best, temperature), token_ids)
            counted = (
                weights_of_ranks(row_ranks, scale) if HAS_WEIGHTS else tl.full([LEN], 1, tl.int64)
            )
            sums += tl.where((row_ranks <= threshold) & (token_ids < vocab_size), counted, 0)
        total = tl.sum(sums, axis=0)
    return total


@triton.jit
def bisect(
    low, high, ranks, weights, wanted, logits, row, best, temperature, stride_row, vocab_size,
    scale, OF_SIZES: tl.constexpr, IS_GATHERED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    LEN: tl.constexpr,
):  # fmt: skip
    """The least rank up to which the number, or weight, of tokens reaches the wanted
    one; else `high`.

    With `OF_SIZES`, the threshold is a magnitude, and tokens of equal magnitude stay together.
    """
    while low < high:
        # The sum of both could overflow 64 bits.
        middle = low + ((high - low) >> 1)
        threshold = (middle << 32) | ALL_IDS if OF_SIZES else middle
        total = tally(
            ranks, weights, threshold, logits, row, best, temperature, stride_row, vocab_size,
            scale, IS_GATHERED, HAS_WEIGHTS, LEN,
        )  # fmt: skip
        low = tl.where(total >= wanted, low, middle + 1)
        high = tl.where(total >= wanted, middle, high)
    return low


@triton.jit
def load_gathered(
    candidates, row, num_gathered, scale, IS_GATHERED: tl.constexpr, ROOM: tl.constexpr
):
    """int64 [ROOM] ranks of the row's gathered tokens, 1 for each, and their weights.

    Without `IS_GATHERED`, the values are unused.
    """
    if IS_GATHERED:
        index = tl.arange(0, ROOM)
        at = candidates + row.to(tl.int64) * ROOM + index
        ranks = tl.load(at, mask=index < num_gathered, other=0)
        ones = (index < num_gathered).to(tl.int64)
        weights = tl.where(index < num_gathered, weights_of_ranks(ranks, scale), 0)
    else:
        ranks = tl.full([ROOM], EVERYTHING, dtype=tl.int64)
        ones = tl.zeros([ROOM], dtype=tl.int64)
        weights = ones
    return ranks, ones, weights


@triton.jit
def find_thresholds(
    logits, bests, doubt, sums, candidates, thresholds, temperatures, top_k, top_p,
    stride_row, vocab_size, num_chunks, scale,
    IS_GATHERED: tl.constexpr, LEN: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The rank of each row's last token that is kept, of the tokens gathered.

    Without `IS_GATHERED`, it handles the rows whose tokens in doubt exceed the room, using all
    their tokens.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    count_wanted = tl.load(top_k + row).to(tl.int64)
    share = tl.load(top_p + row)
    if (temperature == 0) | ((count_wanted == 0) & (share >= 1)):
        return
    doubt += row * 4
    inside = tl.load(doubt + 3)
    if (inside <= ROOM) != IS_GATHERED:
        return
    best = best_of_row(bests, row, num_chunks, CHUNKS)
    ranks, ones, weights = load_gathered(candidates, row, inside, scale, IS_GATHERED, ROOM)
    weight_below = tl.zeros([], dtype=tl.int64)
    count_below = tl.zeros([], dtype=tl.int64)
    if IS_GATHERED:
        weight_below += tl.load(sums + row * 2 + 1)
        count_below += tl.load(doubt + 2)

    low = size_at(tl.load(doubt)).to(tl.int64)
    high = size_at(tl.load(doubt + 1) + 1).to(tl.int64)
    threshold = tl.full([], EVERYTHING, dtype=tl.int64)
    if count_wanted > 0:
        size = bisect(
            low, high, ranks, ones, count_wanted - count_below, logits, row, best, temperature,
            stride_row, vocab_size, scale, True, IS_GATHERED, False, LEN,
        )  # fmt: skip
        # Not found if the k-th token lies beyond all bins in doubt; such tokens never win.
        threshold = tl.where(size < high, (size << 32) | ALL_IDS, threshold)
    if share < 1:
        if count_wanted > 0:
            total = tally(
                ranks, weights, threshold, logits, row, best, temperature, stride_row, vocab_size,
                scale, IS_GATHERED, True, LEN,
            )  # fmt: skip
        else:
            total = tl.load(sums + row * 2)
        wanted = share_of(share, total) - weight_below
        size = bisect(
            low, high, ranks, weights, wanted, logits, row, best, temperature,
            stride_row, vocab_size, scale, True, IS_GATHERED, True, LEN,
        )  # fmt: skip
        # Of equal values the lowest tokens are kept.
        last_kept = bisect(
            size << 32, (size << 32) + vocab_size - 1, ranks, weights, wanted, logits, row, best,
            temperature, stride_row, vocab_size, scale, False, IS_GATHERED, True, LEN,
        )  # fmt: skip
        threshold = tl.minimum(threshold, last_kept)
    tl.store(thresholds + row, threshold)
