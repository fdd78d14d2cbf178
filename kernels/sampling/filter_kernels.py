"""Triton kernels that find where top_k and top_p cut a row; importing this file needs Triton.

Nothing is sorted. A value's magnitude (its distance below the best) falls in one of `BINS`
geometric bins. The bin counts show which bins may contain the thresholds. The tokens of these bins
are gathered, and a bisection finds the threshold among them (`threshold_kernels.py`). Weights are
integers, `exp(value) * 2^shift` rounded: their sums do not depend on the order, so a threshold does
not depend on the launch.
"""

# Annotations in a kernel are Triton types.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_kernels import best_of_row, load_logits, ranks_of, shifted

BINS = tl.constexpr(512)
# A bin is the exponent and five bits of the mantissa; the first begins above 2^-10.
BIN_SHIFT = tl.constexpr(18)
FIRST_BIN = tl.constexpr((127 - 10) << 5)
LAST_BIN = tl.constexpr(511)


@triton.jit
def bins_of(ranks):
    """The bin of each rank. The last one has magnitudes of 64 and more, which noise cannot
    outweigh."""
    bins = ((ranks >> 32) >> BIN_SHIFT).to(tl.int32) - FIRST_BIN
    return tl.minimum(tl.maximum(bins, 0), LAST_BIN)


@triton.jit
def size_at(bins):
    """int32 bits of the least size in a bin."""
    return tl.where(bins == 0, 0, (bins + FIRST_BIN) << BIN_SHIFT)


@triton.jit
def weights_of(sizes, scale):
    """int64 weights of int32 sizes."""
    values = sizes.to(tl.float32, bitcast=True).to(tl.float64)
    return (tl.exp(-values) * scale + 0.5).to(tl.int64)


@triton.jit
def weights_of_ranks(ranks, scale):
    """int64 weights of int64 ranks."""
    return weights_of((ranks >> 32).to(tl.int32), scale)


@triton.jit
def share_of(top_p, total):
    """The sum of weights that top_p keeps; float64 as in numpy, at least 1."""
    wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(wanted, 1)


@triton.jit
def add_up(
    logits, bests, histogram, sums, temperatures, top_k, top_p, stride_row, vocab_size, num_chunks,
    scale, LEN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Counts of all bins; the sum of all weights where only top_p cuts."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    count_wanted = tl.load(top_k + row)
    share = tl.load(top_p + row)
    if (temperature == 0) | ((count_wanted == 0) & (share >= 1)):
        return
    token_ids = tl.program_id(1) * LEN + tl.arange(0, LEN)
    is_token = token_ids < vocab_size
    values = load_logits(logits, row, stride_row, token_ids, vocab_size)
    best = best_of_row(bests, row, num_chunks, CHUNKS)
    ranks = ranks_of(shifted(values, best, temperature), token_ids)
    counts = tl.histogram(bins_of(ranks), BINS, mask=is_token)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram + row * BINS + bins, counts, mask=counts > 0, sem="relaxed")
    if count_wanted == 0:
        weights = tl.where(is_token, weights_of_ranks(ranks, scale), 0)
        tl.atomic_add(sums + row * 2, tl.sum(weights, axis=0), sem="relaxed")


@triton.jit
def bins_in_doubt(histogram, sums, row, count_wanted, share, scale):
    """The first and the last bin in which thresholds may lie, and counts below and in them.

    With top_k and top_p, these are all bins from the best on, since top_p applies after top_k. With
    top_p alone, the weight of a bin lies between its count times the weight at its far edge and at
    its near edge.
    """
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram + row * BINS + bins)
    up_to = tl.cumsum(counts, axis=0)
    if count_wanted > 0:
        last = tl.sum((up_to < count_wanted).to(tl.int32), axis=0)
        first = tl.where(share < 1, 0, last)
    else:
        total = tl.load(sums + row * 2)
        wanted = share_of(share, total)
        wide = counts.to(tl.int64)
        most = wide * (weights_of(size_at(bins), scale) + 1)
        far = weights_of(size_at(bins + 1), scale) - 1
        least = wide * tl.where(bins == LAST_BIN, 0, tl.maximum(far, 0))
        most_beyond = tl.sum(most, axis=0) - tl.cumsum(most, axis=0)
        least_beyond = tl.sum(least, axis=0) - tl.cumsum(least, axis=0)
        last = tl.sum((total - most_beyond < wanted).to(tl.int32), axis=0)
        first = tl.sum((total - least_beyond < wanted).to(tl.int32), axis=0)
    last = tl.minimum(last, LAST_BIN - 1)
    first = tl.minimum(first, last)
    below = tl.sum(tl.where(bins < first, counts, 0), axis=0)
    inside = tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0), axis=0)
    return first, last, below, inside


@triton.jit
def find_doubt(histogram, sums, doubt, temperatures, top_k, top_p, scale):
    """Program row: store `bins_in_doubt` once, for the many programs that read it."""
    row = tl.program_id(0)
    count_wanted = tl.load(top_k + row)
    share = tl.load(top_p + row)
    if (tl.load(temperatures + row) == 0) | ((count_wanted == 0) & (share >= 1)):
        return
    first, last, below, inside = bins_in_doubt(histogram, sums, row, count_wanted, share, scale)
    tl.store(doubt + row * 4, first)
    tl.store(doubt + row * 4 + 1, last)
    tl.store(doubt + row * 4 + 2, below)
    tl.store(doubt + row * 4 + 3, inside)


@triton.jit
def gather(
    logits, bests, doubt, sums, num_gathered, candidates, temperatures, top_k, top_p,
    stride_row, vocab_size, num_chunks, scale,
    LEN: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Ranks of the tokens in bins in doubt, in any order; the weight of those before them."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    count_wanted = tl.load(top_k + row)
    share = tl.load(top_p + row)
    if (temperature == 0) | ((count_wanted == 0) & (share >= 1)):
        return
    if tl.load(doubt + row * 4 + 3) > ROOM:
        return
    first, last = tl.load(doubt + row * 4), tl.load(doubt + row * 4 + 1)
    token_ids = tl.program_id(1) * LEN + tl.arange(0, LEN)
    is_token = token_ids < vocab_size
    values = load_logits(logits, row, stride_row, token_ids, vocab_size)
    best = best_of_row(bests, row, num_chunks, CHUNKS)
    ranks = ranks_of(shifted(values, best, temperature), token_ids)
    bins = bins_of(ranks)
    if (count_wanted == 0) & (first > 0):
        weights = tl.where(is_token & (bins < first), weights_of_ranks(ranks, scale), 0)
        tl.atomic_add(sums + row * 2 + 1, tl.sum(weights, axis=0), sem="relaxed")
    is_inside = (is_token & (bins >= first) & (bins <= last)).to(tl.int32)
    num_inside = tl.sum(is_inside, axis=0)
    if num_inside > 0:
        index = tl.atomic_add(num_gathered + row, num_inside, sem="relaxed")
        index += tl.cumsum(is_inside, axis=0) - 1
        tl.store(candidates + row.to(tl.int64) * ROOM + index, ranks, mask=is_inside > 0)
