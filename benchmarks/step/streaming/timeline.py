"""The picture: what each stage computes when, of one request in rounds and streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....measure.report.plots import DPI, require_matplotlib
from .replayed_stages import Fate, RunStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = {
    Fate.ROOT: "#404040",
    Fate.RIGHT: "#009E73",
    Fate.REFUSED: "#E69F00",
    Fate.KILLED: "#CC79A7",
}
LABELS = {
    Fate.ROOT: "the last known token",
    Fate.RIGHT: "the text went through it",
    Fate.REFUSED: "refused by its own answer",
    Fate.KILLED: "refused before its answer",
}
BAR_HEIGHT = 0.8
SHOWN_S = 0.45


def draw(runs: Mapping[str, Sequence[RunStep]], png: Path) -> None:
    """A panel for each run, by its title. Raises `ConfigError` without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure = Figure(figsize=(15, 3.2 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, (title, steps) in zip(panels, runs.items(), strict=True):
        _panel(axes, title, [step for step in steps if step.parts])
    panels[-1].set_xlabel("milliseconds; each bar is a step, its colours are shares of its rows")
    handles = [Patch(facecolor=COLOURS[fate], label=LABELS[fate]) for fate in Fate]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(png, dpi=DPI)


def _panel(axes: Axes, title: str, steps: Sequence[RunStep]) -> None:
    # From the middle on: nothing is known of a text in its beginning.
    start = steps[len(steps) // 2].spans[0][0]
    shown = [step for step in steps if start <= step.spans[0][0] < start + SHOWN_S]
    num_right = 0
    for step in shown:
        fates = [fate for part in step.parts for fate in part.fates]
        num_right += fates.count(Fate.RIGHT)
        for stage, (begin, end) in enumerate(step.spans):
            _bar(axes, stage, 1e3 * (begin - start), 1e3 * (end - begin), fates)
    num_stages = len(shown[0].spans)
    axes.set_xlim(0, 1e3 * SHOWN_S)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.set_title(f"{title}: {len(shown)} steps, {num_right} drafted tokens", loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _bar(axes: Axes, stage: int, begin: float, length: float, fates: Sequence[Fate]) -> None:
    """One bar, from top to bottom in the order of fates."""
    top = stage - BAR_HEIGHT / 2
    for fate in Fate:
        share = BAR_HEIGHT * fates.count(fate) / len(fates)
        if share:
            axes.broken_barh(
                [(begin, length)], (top, share), facecolors=COLOURS[fate], edgecolors="white",
                linewidth=0.2,
            )  # fmt: skip
            top += share
