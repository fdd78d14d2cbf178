"""Applies changes to logits before sampling, in torch; equals `core/sampling/logit_edits.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.sampling.logit_edits import counts_of
from ...core.steps import LogitEdits, Penalties
from ...core.token_mask import unpack


def edit_logits(logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
    """float32 [rows, vocabulary] with the edits made; without edits, `logits` itself."""
    if not edits:
        return logits
    edited = logits.clone()
    for edit in edits:
        rows = edited[edit.first_row : edit.first_row + edit.num_rows]
        if len(edit.bias_tokens):
            rows[:, _on(rows, edit.bias_tokens).long()] += _on(rows, edit.bias)
        if edit.penalties is not None:
            tokens = _on(rows, edit.penalties.tokens).long()
            rows[:, tokens] = _penalised(rows[:, tokens], edit.penalties)
        if edit.mask is not None:
            rows.masked_fill_(~_on(rows, unpack(edit.mask, rows.shape[1])), -torch.inf)
    return edited


def _on(like: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def _penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    counts = _on(logits, counts_of(penalties, len(logits)))
    # Python numbers would be float64 scalars: the same rounding as numpy's needs float32.
    repetition, frequency, presence = (
        logits.new_tensor(value)
        for value in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    weaker = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where((counts > 0) | _on(logits, penalties.in_prompt), weaker, logits)
    changed = changed - counts.float() * frequency
    return changed - (counts > 0).float() * presence
