"""The picture of `peers.json`: total tokens a second of every server, at each number of streams.

python -m draftline.benchmarks.peers.plot [--results FILE] [--out docs/peers.png]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...measure.report.plots import DPI, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PICTURE = ROOT / "docs" / "peers.png"
OURS = "draftline"
# Of who serves; a draftline whose stages are compiled is darker.
COLOURS = {"transformers": "#9a9a9a", "vLLM": "#e08b3d", OURS: "#7fb0df"}
COMPILED, COMPILED_COLOUR = ", compiled", "#1f5fa8"


@dataclass(slots=True)
class Mode:
    """One server or library with one way to draft: its rounds' rates by number of streams."""

    name: str
    rates: dict[int, list[float]] = field(default_factory=dict)

    @property
    def colour(self) -> str:
        """That of who serves."""
        return COMPILED_COLOUR if self.name.endswith(COMPILED) else COLOURS[self.name.split(",")[0]]


def read_modes(results: dict[str, Any]) -> list[Mode]:
    """Of `peers.json`: transformers first, vLLM, then draftline, each in the order measured."""
    rows = [
        (row["name"], row["streams"], [one["output_throughput"] for one in row["rounds"]])
        for row in results["servers"]
    ]
    rows += [
        (row["name"].removesuffix(", in process"), row["batch"], row["rates"])
        for row in results["in_process"]
    ]
    modes: dict[str, Mode] = {}
    for name, streams, rates in rows:
        modes.setdefault(name, Mode(name)).rates[streams] = rates
    order = list(COLOURS)
    return sorted(modes.values(), key=lambda mode: order.index(mode.name.split(",")[0]))


def write_plot(results: dict[str, Any], path: Path) -> None:
    """Bars of the medians over rounds, with least and most.

    Raises `ConfigError` where matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    modes = read_modes(results)
    loads = sorted({streams for mode in modes for streams in mode.rates})
    figure = Figure(figsize=(9.5, 0.32 * len(modes) + 1.4), layout="constrained")
    panels = figure.subplots(1, len(loads), sharey=True, squeeze=False)[0]
    for axes, streams in zip(panels, loads, strict=True):
        _bars(axes, modes, streams)
        axes.set_title(f"{streams} stream{'s' if streams > 1 else ''}", fontsize="medium")
    panels[0].set_yticks(range(len(modes)), [mode.name for mode in modes])
    panels[0].invert_yaxis()
    figure.supxlabel(_caption(results), fontsize="small", color="#444444")
    figure.savefig(path, dpi=DPI)


def _bars(axes: Axes, modes: Sequence[Mode], streams: int) -> None:
    most = max(max(mode.rates[streams]) for mode in modes if streams in mode.rates)
    for place, mode in enumerate(modes):
        rates = mode.rates.get(streams)
        if rates is None:
            axes.text(0.02 * most, place, "not measured", va="center", fontsize=8, color="#777777")
            continue
        median = statistics.median(rates)
        axes.barh(place, median, color=mode.colour)
        axes.plot([min(rates), max(rates)], [place, place], color="black", linewidth=1)
        axes.text(max(rates) + 0.02 * most, place, f"{median:.0f}", va="center", fontsize=8)
    axes.set_xlim(0, 1.16 * most)
    axes.spines[["top", "right"]].set_visible(False)


def _caption(results: dict[str, Any]) -> str:
    machine = results["machine"]
    processor = machine["processor"].replace("(R)", "")
    return (
        f"tokens/s of all streams: median of {len(results['servers'][0]['rounds'])} rounds, least "
        f"to most; greedy, float32, {results['max_tokens']} tokens an answer\n"
        f"{processor}, {results['threads']} thread a model, torch {machine['torch']}, "
        f"vLLM {results['vllm']}, transformers {machine['transformers']}"
    )


def main(
    *,
    results: Annotated[Path, typer.Option(help="What the comparison wrote.")] = RESULTS,
    out: Annotated[Path, typer.Option(help="Picture; its ending says which kind.")] = PICTURE,
) -> None:
    """Draw the comparison."""
    write_plot(json.loads(results.read_text(encoding="utf-8")), out)


if __name__ == "__main__":
    typer.run(main)
