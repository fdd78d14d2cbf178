"""Triton kernels that change logits before sampling. Importing this file needs Triton.

Launched without fused multiply-add: every operation is rounded separately, as in numpy.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .edit_tables import ROW_FIELDS, EditTables
from .noise_kernels import EXACT
from .sampling_kernels import load_logits

FIELDS = tl.constexpr(ROW_FIELDS)


@triton.jit
def copy_allowed(
    logits, out, rows, masks, stride_row, stride_out, vocab_size, num_words, LEN: tl.constexpr
):
    """Program (row, chunk): copy the logits, with -inf for tokens that the row's mask forbids.

    Runs first, although masks come last: the other edits leave -inf unchanged.
    """
    row = tl.program_id(0)
    token_ids = tl.program_id(1) * LEN + tl.arange(0, LEN)
    is_token = token_ids < vocab_size
    values = load_logits(logits, row, stride_row, token_ids, vocab_size)
    mask = tl.load(rows + row * FIELDS + 6)
    if mask >= 0:
        at = masks + mask * num_words + (token_ids >> 5)
        bits = (tl.load(at, mask=is_token, other=0) >> (token_ids & 31)) & 1
        values = tl.where(bits == 1, values, float("-inf"))
    tl.store(out + row.to(tl.int64) * stride_out + token_ids, values, mask=is_token)


@triton.jit
def change_tokens(
    out, rows, bias_tokens, biases, factors, tokens, times, path, stride_out, LEN: tl.constexpr
):
    """Program row: adds its biases, then penalises tokens of its text, in place."""
    row = tl.program_id(0)
    fields = rows + row * FIELDS
    first_bias, num_biases = tl.load(fields), tl.load(fields + 1)
    first, count = tl.load(fields + 2), tl.load(fields + 3)
    first_step, num_steps = tl.load(fields + 4), tl.load(fields + 5)
    row_out = out + row.to(tl.int64) * stride_out
    for start in range(0, num_biases, LEN):
        index = start + tl.arange(0, LEN)
        mask = index < num_biases
        at = row_out + tl.load(bias_tokens + first_bias + index, mask=mask, other=0)
        bias = tl.load(biases + first_bias + index, mask=mask, other=0.0)
        tl.store(at, tl.load(at, mask=mask) + bias, mask=mask)
    # A barrier: other threads read what a thread has written.
    tl.debug_barrier()
    at_factors = factors + tl.load(fields + 7) * 3
    repetition, frequency, presence = (
        tl.load(at_factors),
        tl.load(at_factors + 1),
        tl.load(at_factors + 2),
    )
    for start in range(0, count, LEN):
        index = start + tl.arange(0, LEN)
        mask = index < count
        at = row_out + tl.load(tokens + first + index, mask=mask, other=0)
        value = tl.load(at, mask=mask, other=0.0)
        doubled = tl.load(times + first + index, mask=mask, other=0)
        seen = doubled >> 1
        for step in range(0, num_steps):
            seen += (tl.load(path + first_step + step) == index).to(tl.int32)
        weaker = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where((seen > 0) | (doubled & 1 == 1), weaker, value)
        value = value - seen.to(tl.float32) * frequency
        value = value - (seen > 0).to(tl.float32) * presence
        tl.store(at, value, mask=mask)


CHUNK = 4096
# Tokens of a text, at a time.
TOKENS = 256


def edit_logits(logits: Tensor, tables: EditTables, out: Tensor) -> None:
    """Store `logits` [rows, vocabulary] with the edits made in `out`, float32 of the same shape.

    Equals `reference.edit_logits` bit by bit. One pass for masks, which copies, and one
    launch for the few tokens that are biased or penalised.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == out.stride(1) == 1
    assert num_rows <= tables.capacity.num_rows
    assert vocab_size == tables.vocab_size
    if not num_rows:
        return
    copy_allowed[num_rows, triton.cdiv(vocab_size, CHUNK)](
        logits, out, tables.rows, tables.masks, logits.stride(0), out.stride(0), vocab_size,
        tables.masks.shape[1], LEN=CHUNK, num_warps=8, **EXACT,
    )  # fmt: skip
    change_tokens[num_rows,](
        out, tables.rows, tables.bias_tokens, tables.biases, tables.factors, tables.tokens,
        tables.times, tables.path, out.stride(0), LEN=TOKENS, **EXACT,
    )  # fmt: skip
