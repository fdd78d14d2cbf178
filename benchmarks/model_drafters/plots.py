"""The suite of model drafters as PNG beside its results.

    python -m draftline.benchmarks.model_drafters.plots

Draws what `tables.py` writes: tau and acceptance by depth, `models.png`, and simulated speeds,
`models-speed.png`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...measure.report.plots import require_matplotlib
from ...measure.simulate.cost_profile import bundled_profiles, read_cost_profile
from ..heads.plots import COLOURS, DPI, draw, name_rows
from ..heads.tables import RESULTS, SHOWN_DEPTHS, Columns, depth_shares, names_of, read_columns
from .tables import SUITE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^")


def draw_speeds(by_profile: Mapping[str, Columns], png: Path) -> None:
    """A panel for each profile: speed over plain decoding of every row, by temperature."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    names = list(dict.fromkeys(name for own in by_profile.values() for name in names_of(own)))
    size = (3 + 4 * len(by_profile), 1.6 + 0.26 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(by_profile), squeeze=False)[0]
    for panel, (profile, columns) in zip(panels, by_profile.items(), strict=True):
        _speeds(panel, names, columns, f"simulated: {profile}")
    name_rows(panels, names)
    panels[-1].legend(fontsize="x-small")
    figure.savefig(png, dpi=DPI)


def _speeds(axes: Axes, names: Sequence[str], columns: Columns, title: str) -> None:
    for (label, content), marker, colour in zip(columns.items(), MARKERS, COLOURS, strict=False):
        known = [
            (content["settings"][name]["speedup"], place)
            for place, name in enumerate(names)
            if name in names_of({label: content})
        ]
        axes.plot(*zip(*known, strict=True), marker, color=colour, markersize=5, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(title=title, xlabel="times plain decoding")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main(
    folder: Annotated[
        Path, typer.Option(help="Folder of the results, and of the plots.")
    ] = RESULTS,
) -> None:
    """Draw what is there."""
    require_matplotlib("folder")
    real = read_columns(folder, suite=SUITE)
    head, first = next(iter(real.items()))
    shares = {name: depth_shares(first, name, SHOWN_DEPTHS) for name in names_of({head: first})}
    draw(real, shares, f"share of steps that accept so many: {head}", folder / "models.png")
    simulated = {
        read_cost_profile(name).name: columns
        for name in bundled_profiles()
        if (columns := read_columns(folder, name, SUITE))
    }
    if simulated:
        draw_speeds(simulated, folder / "models-speed.png")


if __name__ == "__main__":
    typer.run(main)
