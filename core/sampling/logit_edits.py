"""Applies changes to logits before sampling; in torch: `kernels/sampling/edit_reference.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Float32, Int32
from ..steps import LogitEdits, Penalties
from ..token_mask import unpack


def edit_logits(logits: Float32, edits: Sequence[LogitEdits]) -> Float32:
    """float32 [rows, vocabulary] with the edits made; without edits, `logits` itself.

    Bias, then penalties, then the mask, as vLLM does. Each operation is rounded to float32 on its
    own, so that torch gives the same bits.
    """
    if not edits:
        return logits
    edited = logits.copy()
    for edit in edits:
        rows = edited[edit.first_row : edit.first_row + edit.num_rows]
        rows[:, edit.bias_tokens] += edit.bias
        if edit.penalties is not None:
            tokens = edit.penalties.tokens
            rows[:, tokens] = _penalised(rows[:, tokens], edit.penalties)
        if edit.mask is not None:
            rows[np.broadcast_to(~unpack(edit.mask, rows.shape[1]), rows.shape)] = -np.inf
    return edited


def counts_of(penalties: Penalties, num_rows: int) -> Int32:
    """int32 [rows, u]: times that each token is in the answer or on the row's path."""
    counts = np.repeat(penalties.counts[None], num_rows, axis=0)
    np.add.at(counts, (penalties.path_rows, penalties.path_tokens), 1)
    return counts


def _penalised(logits: Float32, penalties: Penalties) -> Float32:
    """Logits [rows, u] of the tokens that penalties speak of."""
    counts = counts_of(penalties, len(logits))
    repetition = np.float32(penalties.repetition)
    weaker = np.where(logits > 0, logits / repetition, logits * repetition)
    changed = np.where((counts > 0) | penalties.in_prompt, weaker, logits)
    changed -= counts.astype(np.float32) * np.float32(penalties.frequency)
    changed -= (counts > 0).astype(np.float32) * np.float32(penalties.presence)
    return changed
