"""A fuzz run of the HTTP server: made-up requests and raw garbage beside steady streams.

    python -m draftline.benchmarks.serving.fuzz [--cases 2000]

Serves the demo model with three drafters and little room, as `draftline serve` does; see
`http_fuzz/run.py`. Needs hypothesis (the extra `dev`). Writes JSON; ends with 1 if anything was
wrong.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...measure.records import machine
from ..http_fuzz.run import SEED, WORKERS, fuzz
from ..http_fuzz.server import SETTINGS

RESULTS = Path(__file__).parents[1] / "results" / "fuzz.json"
LIBRARIES = ("draftline", "hypothesis", "fastapi", "uvicorn", "httptools", "llguidance")


def main(
    *,
    cases: Annotated[int, typer.Option(help="Cases to send.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the cases.")] = SEED,
    workers: Annotated[int, typer.Option(help="Cases under way at once.")] = WORKERS,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Run them and write what was found."""
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(cases, Path(folder), seed=seed, workers=workers)
    result = {
        "command": f"python -m draftline.benchmarks.serving.fuzz --cases {cases} --seed {seed} "
        f"--workers {workers}",
        "machine": machine().fields(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "load_average_before": load_before,
        "settings": SETTINGS,
        **asdict(report),
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    Console().print_json(data=result)
    if report.faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
