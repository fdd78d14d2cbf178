"""Fuzz of all wire formats: what one process says to another, changed at random.

    python -m draftline.benchmarks.wire_fuzz [--messages 100000] [--seed 1]

Real messages of drafters, retrieval servers, stages and API processes are changed (bits, bytes,
lengths, parts of one another), and read by those that receive them. Right is: a value, or an error
of draftline's own, in little memory and time. Writes JSON; ends with 1 if anything else came.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...measure.records import machine
from .formats import formats
from .run import WireFindings, fuzz

RESULTS = Path(__file__).parents[1] / "results" / "wire_fuzz.json"


def main(
    *,
    messages: Annotated[
        int, typer.Option(min=1, help="Changed messages over all formats.")
    ] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the changes.")] = 1,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Read them, and write what was found."""
    console = Console(highlight=False)
    known = formats()
    each = -(-messages // len(known))
    found = [fuzz(one, each, seed) for one in known]
    result = {
        "command": f"python -m draftline.benchmarks.wire_fuzz --messages {messages} --seed {seed}",
        "machine": machine().fields(),
        "num_messages": each * len(known),
        "num_faults": sum(one.num_faults for one in found),
        "formats": [asdict(one) for one in found],
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    console.print(table(found))
    for one in found:
        for fault in one.faults:
            console.print(f"{one.name}: {fault[:200]}", markup=False)
    if result["num_faults"]:
        raise typer.Exit(1)


def table(found: list[WireFindings]) -> Table:
    """A line for each format."""
    made = Table(
        "format", "messages", "read", "refused", "faults", "most KiB", "slowest ms", box=None
    )
    for one in found:
        refused = sum(one.refused.values())
        cells = (one.num_messages, one.num_read, refused, one.num_faults, one.peak_bytes // 1024)
        made.add_row(one.name, *map(str, cells), f"{1e3 * one.slowest_s:.1f}")
    return made


if __name__ == "__main__":
    typer.run(main)
