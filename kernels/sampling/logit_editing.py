"""Changes logits before sampling, in Triton. Importing this file needs Triton."""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
from torch import Tensor

from .edit_kernels import change_tokens, copy_allowed
from .edit_tables import EditTables
from .noise_kernels import EXACT

CHUNK = 4096
# Tokens of a text, at a time.
TOKENS = 256


def edit_logits(logits: Tensor, tables: EditTables, out: Tensor) -> None:
    """Store `logits` [rows, vocabulary] with the edits made in `out`, float32 of the same shape.

    Equals `edit_reference.edit_logits` bit by bit. One pass for masks, which copies, and one
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
