"""The picture and the tables of `peers.json`, in the documentation.

    python -m draftline.benchmarks.peers.plot [--results FILE] [--picture FILE] [--docs FOLDER]

Draws docs/peers.png, replaces the tables between two marks in docs/results.md, and prints what the
page leaves out: latencies, processor time, tau and equal answers. `--docs ""` writes no page.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from rich.console import Console

from ...measure.report.marked_part import replaced
from .report.picture import caption, write_picture
from .report.runs import Comparison, read_comparison
from .report.table import markdown_rates, print_comparison

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
DOCS = ROOT / "docs"
# The part of results.md that is written.
PART = "peers"
WIDTH = 120


def write_docs(comparison: Comparison, docs: Path) -> None:
    """Write the tables of `results.md`. Raises `ConfigError`."""
    page = docs / "results.md"
    line = fill(_line(comparison), WIDTH)
    tables = f"{line}.\n\n{markdown_rates(comparison)}"
    page.write_text(replaced(page.read_text("utf-8"), tables, PART), encoding="utf-8")


def _line(comparison: Comparison) -> str:
    text = caption(comparison).replace("\n", "; ")
    return text[0].upper() + text[1:]


def main(
    *,
    results: Annotated[Path, typer.Option(help="What the comparison wrote.")] = RESULTS,
    picture: Annotated[Path, typer.Option(help="Its ending says which kind.")] = DOCS / "peers.png",
    docs: Annotated[str, typer.Option(help="Folder of the pages; empty: none.")] = str(DOCS),
) -> None:
    """Draw the comparison and write its tables."""
    comparison = read_comparison(results)
    print_comparison(comparison, Console())
    write_picture(comparison, picture)
    if docs:
        write_docs(comparison, Path(docs))


if __name__ == "__main__":
    typer.run(main)
