"""Table and time line of streamed trees beside rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ....measure.report.plots import DPI, require_matplotlib
from .cases import StreamingLoad, StreamingResult
from .replayed_stages import Fate, RunStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAD = (
    "prompts", "T", "drafters", "stages", "requests", "plain", "rounds", "streamed",
    "streamed / rounds", "streamed / plain", "tau", "slices a token", "rows a slice", "killed",
    "stage 0 idle", "host",
)  # fmt: skip
Row = tuple[str, ...]


class Timed(Protocol):
    """A round that was measured."""

    @property
    def tokens_s(self) -> float:
        """Tokens a second."""
        ...


def rows(measured: Sequence[StreamingResult]) -> list[Row]:
    """A row for each load; ratios are medians of the rounds, with their range."""
    return [_row(one) for one in measured]


def _row(one: StreamingResult) -> Row:
    load, by_mode = one.load, one.found
    streamed, rounds = by_mode["streamed"], by_mode["rounds"]
    speeds = [f"{median_of(by_mode[mode], 'tokens_s'):.0f}" for mode in by_mode]
    return (
        *names_of(load),
        *speeds,
        ratios(streamed, rounds),
        ratios(streamed, by_mode["plain"]),
        f"{median_of(rounds, 'tau'):.2f}",
        f"{1 / median_of(streamed, 'tau'):.2f}",
        f"{median_of(streamed, 'rows'):.1f}",
        f"{median_of(streamed, 'killed'):.0%}",
        f"{median_of(streamed, 'idle'):.0%} ({median_of(rounds, 'idle'):.0%})",
        f"{median_of(streamed, 'host'):.0%}",
    )


def names_of(load: StreamingLoad) -> Row:
    """The first cells of a load's row."""
    return (
        load.prompts, f"{load.temperature:g}", load.drafters, str(load.stages), str(load.together)
    )  # fmt: skip


def ratios(found: Sequence[Timed], base: Sequence[Timed], digits: int = 2) -> str:
    """Speeds of rounds over those of the same rounds otherwise: their median and range."""
    own = [one.tokens_s / other.tokens_s for one, other in zip(found, base, strict=True)]
    median, least, most = (
        f"{one:.{digits}f}" for one in (statistics.median(own), min(own), max(own))
    )
    return f"{median} ({least}-{most})"


def median_of(found: Sequence[Timed], name: str) -> float:
    """Of a field of the rounds."""
    return statistics.median(getattr(one, name) for one in found)


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
