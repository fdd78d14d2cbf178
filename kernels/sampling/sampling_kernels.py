"""Triton kernels that choose the tokens of rows; `choose.py` describes their order.

Importing this file needs Triton. Each works on one chunk of one row's vocabulary, all chunks of
all rows at once. Scores of chunks lie in [rows, chunks].
"""

# Annotations in a kernel are Triton types.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ...core.sampling import SCREEN_MARGIN
from .noise_kernels import exact_noise, noise_bits, rough_noise

NO_TOKEN = tl.constexpr(2**31 - 1)
WINDOW = tl.constexpr(2 * SCREEN_MARGIN)
# The best token has 0 and noise above -4; all noise is below 37.
HOPELESS = tl.constexpr(-42.0)


@triton.jit
def load_logits(logits, row, stride_row, token_ids, vocab_size):
    """float32 logits of a row; -inf beyond the vocabulary."""
    at = row.to(tl.int64) * stride_row + token_ids
    loaded = tl.load(logits + at, mask=token_ids < vocab_size, other=float("-inf"))
    return loaded.to(tl.float32)


@triton.jit
def best_of_row(bests, row, num_chunks, CHUNKS: tl.constexpr):
    """The row's largest logit."""
    chunk = tl.arange(0, CHUNKS)
    at = bests + row * num_chunks + chunk
    return tl.max(tl.load(at, mask=chunk < num_chunks, other=float("-inf")), axis=0)


@triton.jit
def shifted(logits, best, temperature):
    """Logits relative to the best and over the temperature, rounded as numpy rounds them."""
    return tl.div_rn(logits - best, temperature)


@triton.jit
def ranks_of(scaled, token_ids):
    """int64 ranks, smaller for better tokens: those of a larger value, or of a lower id among
    equals.

    Values are at most 0, so that the bits of their magnitudes are ordered like integers.
    """
    sizes = tl.abs(scaled).to(tl.int32, bitcast=True).to(tl.int64)
    return (sizes << 32) | token_ids.to(tl.int64)


@triton.jit
def find_bests(
    logits, bests, best_ids, histogram, sums, num_gathered, stride_row, vocab_size,
    LEN: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each chunk, and its lowest token; clears the accumulators of
    the filters.

    For a chunk with NaN it is infinity.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token_ids = chunk * LEN + tl.arange(0, LEN)
    values = load_logits(logits, row, stride_row, token_ids, vocab_size)
    # NaN becomes infinity: a row with either has no token, and a maximum would ignore NaN.
    is_nan = values != values  # noqa: PLR0124 - true of NaN alone
    values = tl.where(is_nan, float("inf"), values)
    best = tl.max(values, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(bests + at, best)
    tl.store(best_ids + at, tl.min(tl.where(values == best, token_ids, NO_TOKEN), axis=0))
    if chunk == 0:
        bins = tl.arange(0, BINS)
        tl.store(histogram + row * BINS + bins, tl.zeros([BINS], dtype=tl.int32))
        tl.store(sums + row * 2 + tl.arange(0, 2), tl.zeros([2], dtype=tl.int64))
        tl.store(num_gathered + row, 0)


@triton.jit
def find_winners(
    logits, bests, thresholds, winners, winner_ids, temperatures, top_k, top_p, floors, keys,
    stride_row, vocab_size, num_chunks, LEN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The token of each chunk with the largest sum of its value and exact noise."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature == 0:
        return
    at = row * num_chunks + chunk
    winner = float("-inf")
    winner_id = NO_TOKEN
    best = best_of_row(bests, row, num_chunks, CHUNKS)
    if shifted(tl.load(bests + at), best, temperature) > HOPELESS:
        token_ids = chunk * LEN + tl.arange(0, LEN)
        values = load_logits(logits, row, stride_row, token_ids, vocab_size)
        scaled = shifted(values, best, temperature)
        is_kept = scaled >= tl.load(floors + row)
        if (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1):
            is_kept = is_kept & (ranks_of(scaled, token_ids) <= tl.load(thresholds + row))
        scaled = tl.where(is_kept, scaled, float("-inf"))
        if tl.max(scaled, axis=0) > HOPELESS:
            key = tl.load(keys + row)
            screen = scaled + rough_noise(noise_bits(key, token_ids))
            is_close = (screen >= tl.max(screen, axis=0) - WINDOW) & (scaled > HOPELESS)
            left = tl.sum(is_close.to(tl.int32), axis=0)
            # Usually there is one. Ascending ids, so that the lowest id wins a tie.
            while left > 0:
                token = tl.min(tl.where(is_close, token_ids, NO_TOKEN), axis=0)
                is_it = token_ids == token
                value = tl.sum(tl.where(is_it, scaled, 0.0), axis=0)
                score = value + exact_noise(noise_bits(key, token))
                is_better = score > winner
                winner = tl.where(is_better, score, winner)
                winner_id = tl.where(is_better, token, winner_id)
                is_close = is_close & (token_ids != token)
                left -= 1
    tl.store(winners + at, winner)
    tl.store(winner_ids + at, winner_id)


@triton.jit
def token_noise(keys, token_ids, noise, num_tokens, LEN: tl.constexpr):
    """The noise of some tokens of each row: int64 and float32 [rows, num_tokens]."""
    row = tl.program_id(0)
    place = tl.arange(0, LEN)
    mask = place < num_tokens
    at = row * num_tokens + place
    tokens = tl.load(token_ids + at, mask=mask, other=0)
    tl.store(noise + at, exact_noise(noise_bits(tl.load(keys + row), tokens)), mask=mask)


@triton.jit
def pick_tokens(
    bests, best_ids, winners, winner_ids, temperatures, out, num_chunks, CHUNKS: tl.constexpr
):
    """Each row's token, of the bests or winners of its chunks; -1 where its best logit is no finite
    number."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    mask = chunk < num_chunks
    most = tl.load(bests + at, mask=mask, other=float("-inf"))
    is_bad = tl.abs(tl.max(most, axis=0)) == float("inf")
    if tl.load(temperatures + row) == 0:
        scores = most
        token_ids = tl.load(best_ids + at, mask=mask, other=NO_TOKEN)
    else:
        scores = tl.load(winners + at, mask=mask, other=float("-inf"))
        token_ids = tl.load(winner_ids + at, mask=mask, other=NO_TOKEN)
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, token_ids, NO_TOKEN), axis=0)
    tl.store(out + row, tl.where(is_bad | (token == NO_TOKEN), -1, token))
