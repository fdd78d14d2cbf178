"""tau and acceptance by depth of the suite of heads, as PNG beside the results.

    python -m draftline.benchmarks.heads.plots

Draws what `tables.py` writes, in `heads.png`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from ...measure.report.plots import require_matplotlib
from .tables import (
    RESULTS,
    SHOWN_DEPTHS,
    Columns,
    depth_shares,
    names_of,
    read_columns,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 140
# Of Okabe and Ito, told apart by who sees colours otherwise.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")


def draw(columns: Columns, shares: Mapping[str, Sequence[float]], title: str, png: Path) -> None:
    """A panel of tau for each file, and one of shares by depth."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    names = names_of(columns)
    figure = Figure(figsize=(2.6 * len(columns) + 6, 1.6 + 0.26 * len(names)), layout="constrained")
    widths = [1.0] * len(columns) + [1.8]
    *panels, depths = figure.subplots(1, len(columns) + 1, width_ratios=widths)
    for panel, (head, content) in zip(panels, columns.items(), strict=True):
        rows = {row["name"]: row["tau"] for row in content["taus"]}
        _taus(panel, [rows.get(name) for name in names], f"tau: {head}")
    name_rows(panels, names)
    for index, (name, own) in enumerate(shares.items()):
        style = STYLES[index // len(COLOURS) % len(STYLES)]
        depths.plot(
            range(1, len(own) + 1), own, marker="o", markersize=3, label=name, linestyle=style,
            color=COLOURS[index % len(COLOURS)],
        )  # fmt: skip
    depths.set(title=title, xlabel="depth", ylim=(0, 1))
    depths.legend(fontsize="x-small", bbox_to_anchor=(1, 1), loc="upper left")
    for axes in (*panels, depths):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, dpi=DPI)


def name_rows(panels: Sequence[Axes], names: Sequence[str]) -> None:
    """Rows from the top down, at one height in all panels; named beside the first."""
    for panel in panels:
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set_ylim(len(names) - 0.5, -0.5)


def _taus(axes: Axes, rows: Sequence[Mapping[str, float] | None], title: str) -> None:
    """Points with their intervals; none where a row was not measured."""
    known = [(place, row) for place, row in enumerate(rows) if row is not None]
    values = np.array([[row["value"], row["low"], row["high"]] for _, row in known]).T
    ends = np.abs(values[1:] - values[0])
    axes.errorbar(values[0], [place for place, _ in known], xerr=ends, fmt="o", color=COLOURS[0])
    axes.set(title=title)
    axes.set_xlim(left=1)


def main(
    folder: Annotated[
        Path, typer.Option(help="Folder of the results, and of the plots.")
    ] = RESULTS,
) -> None:
    """Draw what is there."""
    require_matplotlib("folder")
    every = read_columns(folder)
    head, first = next(iter(every.items()))
    shares = {name: depth_shares(first, name, SHOWN_DEPTHS) for name in names_of({head: first})}
    draw(every, shares, f"share of steps that accept so many: {head}", folder / "heads.png")


if __name__ == "__main__":
    typer.run(main)
