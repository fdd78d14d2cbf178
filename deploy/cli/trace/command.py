"""`draftline trace`: what the file of `serve --trace-steps` says."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ....cluster.engine.trace_file import read_trace
from ....core.errors import ConfigError
from .plot import draw_trace
from .summary import summarise, summary_table


def run_trace(
    file: Path,
    output: Path | None,
    steps: tuple[int | None, int | None],
    console: Console,
    request: int | None = None,
) -> None:
    """Print the summary of the steps between two ids, both included, and draw them; of a `request`
    by its number of arrival, whose tree went out in slices, each flight, too.

    Raises `ConfigError`.
    """
    first, last = steps
    records = [
        record
        for record in read_trace(file)
        if (first is None or record.step >= first) and (last is None or record.step <= last)
    ]
    if not records:
        raise ConfigError("trace", f"{file} holds no such steps")
    summary = summarise(records)
    console.print(summary_table(summary))
    if output is not None:
        draw_trace(records, summary, output, request=request)
        console.print(f"drawn in {output}")
