"""Chooses the tokens of rows of logits, in Triton. Importing this file needs Triton.

Each pass over the logits is one launch for all chunks of all rows:

    greedy         1 the best of each chunk
    temperature    2  and values plus noise; min_p is part of it
    top_k, top_p   4  before the noise: counts of bins, then the tokens in doubt are gathered

Rows of a step may differ: a launch ends at once for rows that do not need it, and is skipped if no
row does. For top_k and top_p, an extra launch of one program a row finds the tokens in doubt. Two
more find the thresholds among the gathered tokens. A last launch picks each row's token from its
chunks, which makes 2, 3 and 8 launches. A row may have more than `room` tokens in doubt (nearly
equal logits throughout; top_k above `room` beside top_p). Then one program bisects over its whole
vocabulary: the same answer, after milliseconds.

Greedy, temperature, top_k and min_p always give the tokens of `core/sampling.py`. So does
top_p, up to the rounding of sums: weights are rounded to 2^-44 of the best one's (2^-50 in small
vocabularies). This moves the sum of n tokens by at most n 2^-45, and numpy's running sum has its
own rounding error. Only the last token in or the first one out can differ, if its sum is that close
to top_p; tests count none. The kernels sum integers, so that the sums do not depend on the launch
or the device's order.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
from torch import Tensor

from .filter_kernels import BINS, add_up, find_doubt, gather
from .noise_kernels import EXACT
from .sampling_kernels import find_bests, find_winners, pick_tokens, token_noise
from .tables import SamplingScratch, SamplingTables
from .threshold_kernels import find_thresholds

# Warps of a program.
WARPS = {"num_warps": 8}
LAUNCH = EXACT | WARPS
# Its numbers stay in registers between the iterations of the bisection.
BISECT_LEN = 2048
BISECT = EXACT | {"num_warps": 16}


def choose_tokens(
    logits: Tensor, tables: SamplingTables, scratch: SamplingScratch, out: Tensor
) -> None:
    """Store each row's token in `out`, int32 [rows]: that of `core/sampling.py`; -1 where
    the best logit is no finite number.

    `logits` [rows, vocabulary] of any float type; `scratch` is overwritten.
    """
    num_rows, num_chunks = tables.num_rows, scratch.num_chunks
    if not num_rows:
        return
    assert logits.stride(1) == 1
    assert len(logits) >= num_rows
    assert logits.shape[1] == tables.vocab_size
    assert scratch.histogram.shape[1] == BINS.value
    size = (logits.stride(0), tables.vocab_size)
    parts = {"LEN": scratch.chunk_len}
    chunks = {"CHUNKS": triton.next_power_of_2(num_chunks)}
    grid = (num_rows, num_chunks)
    find_bests[grid](
        logits, scratch.bests, scratch.best_ids, scratch.histogram, scratch.sums,
        scratch.num_gathered, *size, **parts, BINS=BINS.value, **LAUNCH,
    )  # fmt: skip
    if tables.filters:
        _find_thresholds(logits, tables, scratch)
    if tables.samples:
        find_winners[grid](
            logits, scratch.bests, scratch.thresholds, scratch.winners, scratch.winner_ids,
            tables.temperatures, tables.top_k, tables.top_p, tables.floors, tables.keys,
            *size, num_chunks, **parts, **chunks, **LAUNCH,
        )  # fmt: skip
    pick_tokens[num_rows,](
        scratch.bests, scratch.best_ids, scratch.winners, scratch.winner_ids, tables.temperatures,
        out, num_chunks, **chunks, num_warps=1, **EXACT,
    )  # fmt: skip


def store_noise(token_ids: Tensor, tables: SamplingTables, out: Tensor) -> None:
    """Store the noise of some tokens of each row, of which `token_ids`, int64 [rows, n], has the
    ids, in `out`, float32 [rows, n]."""
    num_rows, count = token_ids.shape
    length = triton.next_power_of_2(count)
    token_noise[num_rows,](tables.keys, token_ids, out, count, LEN=length, **EXACT)


def _find_thresholds(logits: Tensor, tables: SamplingTables, scratch: SamplingScratch) -> None:
    num_chunks = scratch.num_chunks
    filters = (tables.temperatures, tables.top_k, tables.top_p)
    size = (logits.stride(0), tables.vocab_size, num_chunks, weight_scale(tables.vocab_size))
    parts = {"LEN": scratch.chunk_len, "CHUNKS": triton.next_power_of_2(num_chunks)}
    room = {"ROOM": scratch.room}
    grid = (tables.num_rows, num_chunks)
    add_up[grid](
        logits, scratch.bests, scratch.histogram, scratch.sums, *filters, *size, **parts, **LAUNCH
    )
    find_doubt[tables.num_rows,](
        scratch.histogram, scratch.sums, scratch.doubt, *filters, size[-1], **EXACT
    )
    gather[grid](
        logits, scratch.bests, scratch.doubt, scratch.sums, scratch.num_gathered,
        scratch.candidates, *filters, *size, **parts, **room, **LAUNCH,
    )  # fmt: skip
    for is_gathered in (True, False):
        find_thresholds[tables.num_rows,](
            logits, scratch.bests, scratch.doubt, scratch.sums, scratch.candidates,
            scratch.thresholds, *filters, *size, IS_GATHERED=is_gathered, CHUNKS=parts["CHUNKS"],
            LEN=min(scratch.chunk_len, BISECT_LEN), **room, **BISECT,
        )  # fmt: skip


def weight_scale(vocab_size: int) -> float:
    """The factor of weights, a power of two: int64 holds their sum, and float64 each of them."""
    return 2.0 ** min(50, 62 - vocab_size.bit_length())
