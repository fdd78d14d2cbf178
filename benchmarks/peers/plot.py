"""The picture and the tables of `peers.json`, in the documentation.

    python -m draftline.benchmarks.peers.plot [--results FILE] [--picture FILE] [--docs FOLDER]

Draws docs/peers.png, writes the page docs/peers.md, and replaces the tables between two marks in
docs/results.md. `--docs ""` draws only.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from ...measure.report.marked_part import replaced
from .report.picture import caption, write_picture
from .report.runs import Comparison, read_comparison
from .report.table import markdown_details, markdown_rates

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
DOCS = ROOT / "docs"
# The part of results.md that is written.
PART = "peers"
WIDTH = 120

PAGE = """# Beside other servers: what a request waits for

Written by `python -m draftline.benchmarks.peers.plot` from
[peers.json](../benchmarks/results/peers.json); tokens a second stand in [results.md](results.md),
and how it is measured in [benchmarks.md](benchmarks.md).

{caption}.

llama.cpp sends every token as a part of its own, the others what a pass brought, so the time
between parts is only comparable without speculation. Processor time is that of all processes of a
server, prompts included.

{details}
"""


def write_docs(comparison: Comparison, docs: Path) -> None:
    """Write `peers.md`, and the tables of `results.md`. Raises `ConfigError`."""
    page = docs / "results.md"
    line = fill(_line(comparison), WIDTH)
    tables = f"{line}.\n\n{markdown_rates(comparison)}"
    page.write_text(replaced(page.read_text("utf-8"), tables, PART), encoding="utf-8")
    details = PAGE.format(caption=line, details=markdown_details(comparison))
    (docs / "peers.md").write_text(details, encoding="utf-8")


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
    write_picture(comparison, picture)
    if docs:
        write_docs(comparison, Path(docs))


if __name__ == "__main__":
    typer.run(main)
