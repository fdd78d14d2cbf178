"""PNG plots of matched runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import ConfigError
from .summary import BenchResult, Summary, TauRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 140
LATENCIES = ("ttft", "tpot", "itl", "e2el")
MIN_POSITIONS, MAX_POSITIONS = 4, 16
LEGEND_COLUMNS = 3
MARKERS = "osD^v<>pX*"


def write_plots(result: BenchResult, folder: Path) -> list[Path]:
    """Write `speed.png`, `latency.png` and, where something was drafted, `acceptance.png`; where
    settings count steps, `tau.png`.

    Returns their paths. Raises `ConfigError` where matplotlib is missing.
    """
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"speed": _speed(result.summaries), "latency": _latency(result.summaries)}
    drafted = [
        summary
        for summary in result.summaries
        if summary.whole.counts and summary.whole.counts.drafted
    ]
    if drafted:
        figures["acceptance"] = _acceptance(drafted)
    if len(result.taus) > 1:
        figures["tau"] = _taus(result.taus)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return paths


def require_matplotlib(field: str = "plots") -> None:
    """Raise `ConfigError` naming `field` where matplotlib is missing.

    Called before a measurement, so that no result is lost.
    """
    try:
        import matplotlib  # noqa: F401, PLC0415 - plots are optional
    except ImportError as error:
        raise ConfigError(field, "needs matplotlib: pip install 'draftline[bench]'") from error


def _figure(columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    # Without pyplot there is no window and no global state.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _bars(axes: Axes, names: Sequence[str]) -> None:
    """Horizontal bars, since settings have long names."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _speed(summaries: Sequence[Summary]) -> Figure:
    figure, [axes] = _figure(1, 8, 1.2 + 0.32 * len(summaries))
    rates = [summary.rate for summary in summaries]
    low = [summary.rate - min(summary.rates) for summary in summaries]
    high = [max(summary.rates) - summary.rate for summary in summaries]
    bars = axes.barh(range(len(rates)), rates, xerr=[low, high], capsize=3, color="tab:blue")
    labels = [f"{summary.speedup:.2f}x" for summary in summaries]
    axes.bar_label(bars, labels, padding=8)
    axes.margins(x=0.15, y=0.02)
    axes.set_xlabel("output tokens/s: median over rounds, least to most\nbeside it the speedup")
    _bars(axes, [summary.name for summary in summaries])
    return figure


def _latency(summaries: Sequence[Summary]) -> Figure:
    figure, panels = _figure(len(LATENCIES), 12, 1.4 + 0.4 * len(summaries))
    for axes, name in zip(panels, LATENCIES, strict=True):
        latencies = [getattr(summary.whole, name) for summary in summaries]
        for offset, label, colour in ((-0.2, "median", "tab:blue"), (0.2, "p99", "tab:orange")):
            heights = [1000 * getattr(each, label) if each else 0.0 for each in latencies]
            places = [index + offset for index in range(len(latencies))]
            title = "P99" if label == "p99" else label
            axes.barh(places, heights, height=0.38, label=title, color=colour)
        axes.set_xlabel(f"{name.upper()}, ms")
        _bars(axes, [summary.name for summary in summaries])
        if axes is not panels[0]:
            axes.set_yticklabels([])
    handles: Any = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", ncols=2, frameon=False)
    return figure


def _acceptance(summaries: Sequence[Summary]) -> Figure:
    """Acceptance by depth for every setting, and by source for the setting with most sources."""
    from matplotlib import colormaps  # noqa: PLC0415

    legend_rows = -(-len(summaries) // LEGEND_COLUMNS)
    figure, [left, right] = _figure(2, 12, 4 + 0.25 * legend_rows)
    colours = colormaps["tab10" if len(summaries) <= len(MARKERS) else "tab20"]
    for index, summary in enumerate(summaries):
        assert summary.whole.counts is not None
        shares = summary.whole.counts.by_position[:MAX_POSITIONS]
        style: Any = {"color": colours(index), "marker": MARKERS[index % len(MARKERS)]}
        left.plot(
            range(len(shares)), shares, markersize=4, linewidth=1, label=summary.name, **style
        )
    left.set_xlabel("position in the draft")
    left.set_ylabel("share of steps that accepted it")
    left.set_ylim(0, 1.05)
    _whole_numbers(left)
    handles: Any = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False)
    mixed = max(summaries, key=lambda summary: len(summary.whole.position_by_source))
    _stack(right, mixed)
    return figure


def _taus(rows: Sequence[TauRow]) -> Figure:
    """tau of every setting with its interval, and beside it the values of each category."""
    kinds = list(rows[0].by_category)
    figure, panels = _figure(2 if kinds else 1, 8 + 0.75 * len(kinds), 1.4 + 0.32 * len(rows))
    values = [row.tau.value for row in rows]
    low = [row.tau.value - row.tau.low for row in rows]
    high = [row.tau.high - row.tau.value for row in rows]
    style: Any = {"fmt": "o", "capsize": 3, "markersize": 4, "color": "tab:blue"}
    panels[0].errorbar(values, range(len(rows)), xerr=[low, high], **style)
    panels[0].set_xlabel("tau: tokens a step, 95 % interval over prompts")
    panels[0].grid(axis="x", alpha=0.3)
    _bars(panels[0], [row.name for row in rows])
    if kinds:
        _heat(panels[1], rows, kinds)
    return figure


def _heat(axes: Axes, rows: Sequence[TauRow], kinds: Sequence[str]) -> None:
    """Values of settings by category; each column has its own colour scale."""
    values = np.array([[row.by_category[kind].value for kind in kinds] for row in rows])
    span = np.ptp(values, axis=0)
    shades = (values - values.min(axis=0)) / np.where(span > 0, span, 1.0)
    axes.imshow(shades, aspect="auto", cmap="Blues", vmin=0, vmax=1.4)
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right")
    axes.set_yticks([])
    axes.set_title("by category", fontsize="medium")


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(-0.6, max(MIN_POSITIONS - 0.4, axes.get_xlim()[1]))


def _stack(axes: Axes, summary: Summary) -> None:
    """Accepted tokens by depth, the sources on top of each other."""
    sources = summary.whole.position_by_source
    depths = min(MAX_POSITIONS, max(map(len, sources.values()), default=0))
    base = [0] * depths
    for source, counts in sources.items():
        axes.bar(range(depths), counts[:depths], bottom=base, label=source)
        base = [a + b for a, b in zip(base, counts, strict=False)]
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted tokens")
    axes.set_title(f"{summary.name}, by source", fontsize="medium")
    _whole_numbers(axes)
    if sources:
        axes.legend(frameon=False)
