"""Draws a head's training as a PNG: its loss by step, and the acceptance at checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = "curves.png"
# The loss is shown as a mean over this share of the run, beside that of each step.
SMOOTHED_SHARE = 0.04
DPI = 120


def draw_curves(
    losses: Sequence[float], checkpoints: Sequence[Sequence[float]], png: Path, title: str
) -> None:
    """Write a picture with two panels.

    losses       of each step from the first; NaN where unknown. If empty, the checkpoints' losses
                 are drawn
    checkpoints  step, loss and the share of accepted drafts at each depth, as `read_log` has them
    """
    # Matplotlib is optional: training needs none of it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    if losses:
        _draw_losses(left, np.array(losses, dtype=np.float64))
    else:
        steps, found = zip(*(row[:2] for row in checkpoints), strict=True)
        left.plot(steps, found, marker="o", markersize=3, label="at checkpoints")
    left.set(title="loss", ylabel="loss")
    left.legend()
    _draw_acceptance(right, checkpoints)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(png, dpi=DPI)


def _draw_losses(axes: Axes, losses: np.ndarray) -> None:
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, linewidth=0.6, alpha=0.4, label="of a step")
    span = max(1, round(SMOOTHED_SHARE * len(losses)))
    is_known = ~np.isnan(losses)
    known = losses[is_known]
    if len(known) >= span:
        smooth = np.convolve(known, np.full(span, 1 / span), mode="valid")
        middles = steps[is_known][span // 2 : span // 2 + len(smooth)]
        axes.plot(middles, smooth, linewidth=2, label=f"mean of {span}")


def _draw_acceptance(axes: Axes, checkpoints: Sequence[Sequence[float]]) -> None:
    from matplotlib import colormaps

    steps = [row[0] for row in checkpoints]
    depths = max(len(row) for row in checkpoints) - 2
    for depth in range(depths):
        shares = [row[2 + depth] for row in checkpoints]
        colour = colormaps["viridis"](0.9 * depth / max(1, depths - 1))
        axes.plot(steps, shares, marker="o", markersize=3, color=colour, label=f"{depth + 1}")
    axes.set(title="accepted behind accepted drafts, held-out texts", ylabel="share", ylim=(0, 1))
    axes.set_xlim(left=0)
    axes.legend(title="depth", ncols=2, fontsize="small")
