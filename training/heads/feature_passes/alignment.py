"""Which rows a pass trains on: those whose drafted context could have been accepted.

Token-alignable drafts of GRIFFIN (arXiv 2502.11018), section 3.1. If an earlier draft was not among
the head's best few tokens, no tree would contain it or any draft after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

MaskForm = Literal["paper", "code"]


def is_aligned(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """bool [..., rows]: whether the target token is among the `count` best of a row.

    logits  [..., rows, vocabulary]
    tokens  int64 [..., rows] the target tokens
    """
    best = logits.topk(count, dim=-1).indices
    return (best == tokens.unsqueeze(-1)).any(-1)


def pass_mask(aligned: Sequence[Tensor], answers: Tensor, form: MaskForm = "paper") -> Tensor:
    """bool [..., rows]: the rows of the next pass.

    aligned  of each pass before it, `is_aligned` [..., rows]
    answers  bool [..., rows] rows whose tokens are trained on

    Row t of pass n reads the output of pass n - 1 at row t - 1, which read that of pass n - 2 at
    row t - 2, and so on. With `form: code` all are one row later, as in GRIFFIN's released code,
    which checks the previous pass at the row itself. Rows without such a past are excluded.
    """
    mask = answers.clone()
    late = 0 if form == "paper" else 1
    for back, earlier in enumerate(reversed(aligned), start=1):
        distance = back - late
        mask &= shifted(earlier, distance)
    return mask


def shifted(rows: Tensor, distance: int) -> Tensor:
    """The values `distance` rows before each, False where there is none: bool [..., rows]."""
    moved = rows.roll(distance, -1)
    moved[..., :distance] = False
    return moved
