"""Table and plot of the refinement experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ....core.arrays import Float64
from ....measure.report.intervals import Interval, drawn_taus, interval
from ....measure.report.plots import DPI, require_matplotlib
from .stores import DocumentChoice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODES = {"alone": "", "with_core": "+core"}


def rows_of(
    stores: Sequence[DocumentChoice],
    counts: Mapping[str, Float64],
    sizes: Mapping[str, int],
    perplexities: Mapping[str, float],
    lookups: Mapping[str, float],
) -> list[dict[str, Any]]:
    """A row for each store but the random ones, which share one for each budget.

    counts  float64 [prompts, 2] of each store's name, and of it with CORE
    """
    rows = [_core_row(counts)]
    for budget in sorted({store.budget for store in stores}, reverse=True):
        own = [store for store in stores if store.budget == budget]
        drawn = [store.name for store in own if store.kind == "random"]
        for store in own:
            if store.kind == "random" and store.draw:
                continue
            row: dict[str, Any] = {
                "kind": store.kind,
                "tokens": sizes[store.name],
                "median_perplexity": perplexities.get(store.name),
                "lookup_us": lookups.get(store.name),
            }
            for mode, suffix in MODES.items():
                if store.kind == "random":
                    row[mode] = asdict(_mean(drawn, suffix, counts))
                    taus = [_tau(counts[f"{name}{suffix}"]) for name in drawn]
                    row[f"{mode}_least_most"] = [min(taus), max(taus)]
                    continue
                row[mode] = asdict(_of(store.name, suffix, counts))
                if drawn:
                    row[f"{mode}_beyond_random"] = asdict(
                        _beyond(store.name, drawn, suffix, counts)
                    )
            rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], temperature: float, console: Console) -> None:
    """Print the rows."""
    table = Table(
        "store", "tokens", "perplexity", "lookup, us", "tau", "beyond random", "with CORE",
        "beyond random", box=None, title=f"temperature {temperature:g}", title_justify="left",
    )  # fmt: skip
    for row in rows:
        cells = [row["kind"], f"{row['tokens']:,}" if row["tokens"] else ""]
        for key in ("median_perplexity", "lookup_us"):
            cells.append("" if row.get(key) is None else f"{row[key]:.1f}")
        for mode in MODES:
            for key, sign in ((mode, ""), (f"{mode}_beyond_random", "+")):
                cells.append(_shown(row.get(key), sign))
        table.add_row(*cells)
    console.print(table)


def _shown(one: Mapping[str, float] | None, sign: str) -> str:
    if one is None:
        return ""
    ends = f"({one['low']:{sign}.3f} - {one['high']:{sign}.3f})"
    return f"{one['value']:{sign}.3f} {ends}"


def _core_row(counts: Mapping[str, Float64]) -> dict[str, Any]:
    return {"kind": "CORE alone", "tokens": 0, "with_core": asdict(_of("core", "", counts))}


def _tau(counts: Float64) -> float:
    tokens, steps = counts.sum(axis=0)
    return float(tokens / steps)


def _of(name: str, suffix: str, counts: Mapping[str, Float64]) -> Interval:
    whole, drawn = drawn_taus(counts[f"{name}{suffix}"][None])
    return interval(whole[0], drawn[:, 0])


def _mean(names: Sequence[str], suffix: str, counts: Mapping[str, Float64]) -> Interval:
    """The mean of several stores, in draws of prompts and of stores."""
    whole, drawn = drawn_taus(np.stack([counts[f"{name}{suffix}"] for name in names]))
    return interval(whole.mean(), _resampled(drawn))


def _beyond(
    name: str, others: Sequence[str], suffix: str, counts: Mapping[str, Float64]
) -> Interval:
    """How much more tau a store has than the mean of others, on the same draws of prompts."""
    totals = np.stack([counts[f"{one}{suffix}"] for one in (name, *others)])
    whole, drawn = drawn_taus(totals)
    return interval(whole[0] - whole[1:].mean(), drawn[:, 0] - _resampled(drawn[:, 1:]))


def _resampled(drawn: Float64) -> Float64:
    """float64 [draws]: the mean over stores that were drawn with replacement, too."""
    rng = np.random.default_rng(1)
    count = drawn.shape[1]
    weights = rng.multinomial(count, np.full(count, 1 / count), len(drawn)) / count
    return (drawn * weights).sum(axis=1)


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
