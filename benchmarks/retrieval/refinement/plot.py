"""The picture of the experiment: tau of the stores by their size, beside random ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....measure.report.plots import DPI, require_matplotlib
from .table import MODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "random": "tab:grey", "lowest": "tab:blue", "highest": "tab:orange", "coverage": "tab:green",
    "token_coverage": "tab:olive", "whole": "black", "own": "tab:red",
}  # fmt: skip
LABELS = {
    "random": "random: mean of the draws", "lowest": "lowest perplexity",
    "highest": "highest perplexity", "coverage": "coverage, by 1 / perplexity",
    "token_coverage": "coverage, by the token's probability", "whole": "whole corpus",
    "own": "the target's own text",
}  # fmt: skip
TITLES = {"alone": "RETRIEVAL alone", "with_core": "behind CORE (SPECTRA)"}


def write_plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """PNG: a panel for each temperature and mode. Raises `ConfigError` without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    figure = Figure(figsize=(11, 4 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), len(MODES), squeeze=False)
    for line, run in zip(panels, runs, strict=True):
        for axes, mode in zip(line, MODES, strict=True):
            _panel(axes, run["stores"], mode)
            axes.set_title(f"{TITLES[mode]}, temperature {run['temperature']:g}", fontsize="medium")
    handles: Any = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=DPI)


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], mode: str) -> None:
    for place, (kind, colour) in enumerate(COLOURS.items()):
        own = [row for row in rows if row["kind"] == kind]
        # Side by side, where sizes are equal.
        shift = 1 + 0.02 * (place - len(COLOURS) / 2)
        sizes = [shift * row["tokens"] for row in own]
        values = [row[mode]["value"] for row in own]
        ends = [
            [value - row[mode]["low"] for row, value in zip(own, values, strict=True)],
            [row[mode]["high"] - value for row, value in zip(own, values, strict=True)],
        ]
        axes.errorbar(
            sizes, values, yerr=ends, color=colour, marker="o", capsize=3, linewidth=1,
            label=LABELS[kind],
        )  # fmt: skip
    core = next(row for row in rows if row["kind"] == "CORE alone")
    if mode == "with_core":
        axes.axhline(core[mode]["value"], color="black", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("tokens stored")
    axes.set_ylabel("tau, 95 % over prompts")
    axes.spines[["top", "right"]].set_visible(False)
