"""The picture and the tables of `peers.json`, in the documentation.

    python -m draftline.benchmarks.peers.plot [--results FILE] [--docs FOLDER]

Of NAME.json it draws docs/NAME.png, and replaces the tables between two marks of that name in
docs/results.md. Prints what the page leaves out: latencies, processor time, tau and equal answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ...measure.report.plots import DPI, require_matplotlib
from ..pages import replaced
from .report import (
    OUR_DEFAULT,
    OURS,
    Comparison,
    conditions,
    family,
    markdown_rates,
    print_comparison,
    read_comparison,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of who serves; draftline as it serves by default is darker and thicker.
COLOURS = {"transformers": "#777777", "vLLM": "#d97b28", "llama.cpp": "#4f9a5b", OURS: "#5b9bd5"}
OTHER_COLOUR, DEFAULT_COLOUR = "#a05fb0", "#16549c"
# One family's settings in the order of its first runs.
STYLES, MARKERS = ("-", "--", ":", "-."), "osD^vPX"
LEGEND_INCHES = 2.4
RATES = (20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True, slots=True)
class Line:
    """One server in one panel: its rounds' tokens a second by number of streams, rising."""

    name: str
    rates: dict[int, list[float]]


def read_lines(comparison: Comparison, label: str) -> list[Line]:
    """The servers that answered a set of prompts, peers first."""
    lines = []
    for name in comparison.servers:
        rates = {}
        for streams in comparison.loads:
            runs = comparison.cell(label, streams).get(name)
            if runs:
                rates[streams] = [run.rate for run in runs.values()]
        if rates:
            lines.append(Line(name, rates))
    return lines


def write_picture(comparison: Comparison, path: Path) -> None:
    """Lines through the medians over rounds, with least and most.

    Raises `ConfigError` where matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    labels = comparison.labels
    figure = Figure(
        figsize=(5.0 + 3.2 * (len(labels) - 1) + LEGEND_INCHES, 4.9), layout="constrained"
    )
    panels = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
    for axes, label in zip(panels, labels, strict=True):
        _panel(axes, comparison, label)
    panels[0].set_ylabel("tokens/s of all streams")
    names = dict.fromkeys(line for axes in panels for line in axes.get_legend_handles_labels()[1])
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        [handles[name] for name in names], list(names), loc="outside right center",
        fontsize="small", frameon=False,
    )  # fmt: skip
    figure.supxlabel(caption(comparison), fontsize="small", color="#444444")
    figure.savefig(path, dpi=DPI)


def _panel(axes: Axes, comparison: Comparison, label: str) -> None:
    loads = comparison.loads
    for line in read_lines(comparison, label):
        medians = [statistics.median(rates) for rates in line.rates.values()]
        pairs = list(zip(medians, line.rates.values(), strict=True))
        errors = [
            [middle - min(rates) for middle, rates in pairs],
            [max(rates) - middle for middle, rates in pairs],
        ]
        axes.errorbar(
            list(line.rates), medians, yerr=errors, label=line.name, capsize=2, markersize=4,
            **_look(line.name, comparison.servers),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(loads, [str(count) for count in loads])
    low, high = axes.get_ylim()
    axes.set_yticks(RATES, [str(rate) for rate in RATES])
    axes.minorticks_off()
    axes.set_ylim(low, high)
    axes.set_title(label, fontsize="medium")
    axes.set_xlabel("streams", fontsize="small")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _look(name: str, servers: Sequence[str]) -> dict[str, Any]:
    place = [one for one in servers if family(one) == family(name)].index(name)
    is_default = name == OUR_DEFAULT
    return {
        "color": DEFAULT_COLOUR if is_default else COLOURS.get(family(name), OTHER_COLOUR),
        "linestyle": "-" if is_default else STYLES[place % len(STYLES)],
        "marker": MARKERS[place % len(MARKERS)],
        "linewidth": 2.2 if is_default else 1.1,
    }


def caption(comparison: Comparison) -> str:
    """What was measured, and on what."""
    about = comparison.about
    machine = about["machine"]
    rounds = len({run.round for run in comparison.runs})
    many = f"medians of {rounds} rounds, least to most" if rounds > 1 else "one round"
    peers = [
        f"{name} {about[key]}"
        for name, key in (("vLLM", "vllm"), ("llama.cpp", "llama_cpp"))
        if about.get(key)
    ]
    most = "at most " if about.get("is_chat") else ""
    longest = about.get("prompt_tokens")
    prompts = f"prompts of at most {longest} tokens, " if longest else ""
    threads = f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    return (
        f"model {about.get('model', 'demo')}; {many}\n{conditions(comparison)}\n"
        f"{prompts}{most}{about['max_tokens']} tokens an answer\n"
        f"{machine['processor'].replace('(R)', '')}, {threads} a model\n"
        f"torch {machine['torch']}, transformers {machine['transformers']}, {', '.join(peers)}"
    )


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
DOCS = ROOT / "docs"
WIDTH = 120


def write_docs(comparison: Comparison, docs: Path, part: str) -> None:
    """Write the tables of a part of `results.md`. Raises `ConfigError`."""
    page = docs / "results.md"
    line = fill(_line(comparison), WIDTH)
    tables = f"{line}.\n\n{markdown_rates(comparison)}"
    page.write_text(replaced(page.read_text("utf-8"), tables, part), encoding="utf-8")


def _line(comparison: Comparison) -> str:
    text = caption(comparison).replace("\n", "; ")
    return text[0].upper() + text[1:]


def main(
    *,
    results: Annotated[Path, typer.Option(help="What the comparison wrote.")] = RESULTS,
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = DOCS,
) -> None:
    """Draw the comparison and write its tables."""
    comparison = read_comparison(results)
    print_comparison(comparison, Console())
    write_picture(comparison, docs / f"{results.stem}.png")
    write_docs(comparison, docs, results.stem)


if __name__ == "__main__":
    typer.run(main)
