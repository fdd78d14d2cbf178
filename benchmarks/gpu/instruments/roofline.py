"""The roofline: what was achieved over the operations for each byte."""

from __future__ import annotations

from pathlib import Path

from ....measure.report.plots import DPI, MARKERS
from ..findings import Findings, byte_rate, flop_rate
from ..floors import Rates


def write_roofline(findings: Findings, title: str, path: Path) -> None:
    """A PNG of all figures that multiply. Raises `ImportError` where matplotlib is missing."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    assert findings.rates is not None
    rates = findings.rates
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    shown = [one for one in findings.figures if one.work.flops]
    groups = list(dict.fromkeys(one.group for one in shown))
    for index, group in enumerate(groups):
        points = [one for one in shown if one.group == group]
        axes.plot(
            [one.work.intensity for one in points],
            [one.work.flops / one.seconds / 1e12 for one in points],
            MARKERS[index % len(MARKERS)],
            color=f"C{index % 10}", markersize=5, alpha=0.8, label=group,
        )  # fmt: skip
    lowest = min((one.work.intensity for one in shown), default=1.0) / 2
    highest = max([2 * one.work.intensity for one in shown] + [4 * _ridge(rates)])
    corners = [lowest, _ridge(rates), highest]
    roof = [min(rates.flops, corner * rates.num_bytes) / 1e12 for corner in corners]
    axes.plot(corners, roof, color="black", linewidth=1.2, label=_roof_name(rates), zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte that must be moved")
    axes.set_ylabel("TFLOP/s achieved")
    axes.set_title(title, fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _ridge(rates: Rates) -> float:
    """Where both roofs meet."""
    return rates.flops / rates.num_bytes


def _roof_name(rates: Rates) -> str:
    return f"{byte_rate(rates.num_bytes)}, {flop_rate(rates.flops)} measured"
