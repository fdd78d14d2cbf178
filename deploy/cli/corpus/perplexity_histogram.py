"""A picture of a corpus' perplexities."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ....measure.report.plots import DPI
from ....retrieval_store.corpus.report import CorpusReport

BINS = 60


def write_histogram(report: CorpusReport, path: Path) -> None:
    """PNG: documents by perplexity, those that were kept in front of all that were scored.

    Needs matplotlib, and a report of which something was scored.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    scored = _finite(report.scored)
    kept = _finite(report.kept_scored)
    low, high = min(scored), max(scored)
    edges = np.geomspace(low, max(high, low * 1.01), BINS + 1).tolist()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.hist(scored, bins=edges, color="lightgrey", label=f"scored: {len(scored):,}")
    axes.hist(kept, bins=edges, color="tab:blue", label=f"kept: {len(kept):,}")
    axes.axvline(float(np.median(scored)), color="dimgrey", linestyle=":", linewidth=1)
    axes.annotate(
        f"median {np.median(scored):.2f}", (float(np.median(scored)), 1),
        xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points",
        color="dimgrey",
    )  # fmt: skip
    axes.set_xscale("log")
    _plain_ticks(axes)
    axes.set_xlabel("perplexity of the document under the target")
    axes.set_ylabel("documents")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _plain_ticks(axes: object) -> None:
    from matplotlib.axes import Axes  # noqa: PLC0415
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    assert isinstance(axes, Axes)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _finite(values: tuple[float, ...]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
