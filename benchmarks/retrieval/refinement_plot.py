"""The picture of `refinement.py`: tau against store size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...measure.report.plots import DPI, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"lowest": "tab:blue", "random": "tab:grey", "highest": "tab:orange"}


def write_plot(rows: Sequence[dict[str, Any]], core: float, path: Path) -> None:
    """PNG of the stores in `rows`; `core` is tau of CORE without one.

    Raises `ConfigError` where matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, rows, "tau_retrieval")
    left.set_title("RETRIEVAL alone", fontsize="medium")
    _curves(right, rows, "tau_core_and_retrieval")
    right.axhline(core, color="black", linestyle="--", linewidth=1, label="CORE alone")
    right.set_title("CORE and RETRIEVAL (SPECTRA)", fontsize="medium")
    handles: Any = right.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=DPI)


def _curves(axes: Axes, rows: Sequence[dict[str, Any]], field: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    for kind, colour in COLOURS.items():
        shares = sorted({row["share"] for row in rows if row["kind"] == kind})
        groups = [[r for r in rows if r["kind"] == kind and r["share"] == s] for s in shares]
        sizes = [np.mean([row["tokens"] for row in group]) for group in groups]
        values = [[row[field] for row in group] for group in groups]
        means = [float(np.mean(one)) for one in values]
        low = [mean - min(one) for mean, one in zip(means, values, strict=True)]
        high = [max(one) - mean for mean, one in zip(means, values, strict=True)]
        label = f"{kind} perplexity" if kind != "random" else "random: mean, least to most"
        axes.errorbar(
            sizes, means, yerr=[low, high], color=colour, marker="o", capsize=3, label=label
        )
    [whole] = [row for row in rows if row["kind"] == "whole"]
    axes.plot(whole["tokens"], whole[field], color="black", marker="*", markersize=10,
              linestyle="", label="whole corpus")  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens in the store: 3, 10, 30 and 100 % of the documents")
    axes.set_ylabel("tau: tokens a step")
    axes.spines[["top", "right"]].set_visible(False)
