"""Schemathesis against `/openapi.json` with the keys of an operator and of tenants: no 5xx.

    pip install schemathesis    # an environment of its own will do
    python -m draftline.benchmarks.serving.openapi_fuzz --schemathesis PATH/TO/st

Serves the demo model with two tenants, one of which meets its limits all the time, and has
schemathesis send what the page says is right and what it says is wrong. Writes JSON; ends with 1 if
a request got a 5xx, or if a phase did not come to its end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ...measure.records.record import machine
from .on_ray.server import served

RESULTS = Path(__file__).parents[1] / "results" / "openapi_fuzz.json"
CALLERS = ("operator", "free", "bound")
SEED = 22
TIMEOUT_S = 1800
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_tokens": 4096,
    "drafters": [{"kind": "prompt_lookup"}, {"kind": "suffix"}],
    "server": {
        "api_keys": ["operator"],
        "tenants": [
            {"name": "free", "key_sha256": sha256(b"free").hexdigest()},
            {
                "name": "bound", "key_sha256": sha256(b"bound").hexdigest(), "max_concurrency": 1,
                "requests_per_minute": 2000, "tokens_per_minute": 20_000, "max_context": 64,
                "drafters": ["suffix"],
            },
        ],
    },
}  # fmt: skip


def main(
    *,
    schemathesis: Annotated[
        str, typer.Option(help="The command of schemathesis, st, with its path.")
    ] = "st",
    examples: Annotated[int, typer.Option(help="Made-up requests of an operation, most.")] = 60,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Run it once for each caller."""
    command = shutil.which(schemathesis)
    if command is None:
        raise typer.BadParameter(f"{schemathesis} is not there: pip install schemathesis")
    with served(SETTINGS) as server:
        found = {name: _run(command, server.url, name, examples) for name in CALLERS}
    content = {
        "machine": machine().fields(),
        "settings": {**SETTINGS, "server": "an operator and two tenants, one with tight limits"},
        "seed": SEED,
        "examples": examples,
        "callers": found,
    }
    output.write_text(json.dumps(content, indent=1) + "\n")
    _print(found)
    if any(row["server_errors"] or row["exit_code"] for row in found.values()):
        raise typer.Exit(1)


def _run(command: str, url: str, key: str, examples: int) -> dict[str, Any]:
    """What schemathesis found with one key."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            command, "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {key}",
            "--checks", "not_a_server_error", "--max-examples", str(examples),
            "--seed", str(SEED), "--continue-on-failure", "--no-color", "--request-timeout", "60",
            "--report", "json", "--report-json-path", "report.json",
        ]  # fmt: skip
        done = subprocess.run(
            arguments, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        report = json.loads((Path(folder) / "report.json").read_text("utf-8"))
    if done.returncode:
        Console().print(done.stdout, markup=False)
    rates = [phase for phases in report["valid_rates"].values() for phase in phases.values()]
    return {
        "schemathesis": report["schemathesis_version"],
        "operations": report["operations"]["tested"],
        "requests": report["test_cases"]["generated"],
        "accepted": sum(rate["accepted"] for rate in rates),
        "server_errors": report["test_cases"]["with_failures"],
        "exit_code": done.returncode,
        "seconds": round(report["running_time"], 1),
    }


def _print(found: Mapping[str, Mapping[str, Any]]) -> None:
    columns = ("operations", "requests", "accepted", "server_errors", "seconds")
    table = Table("caller", *(name.replace("_", " ") for name in columns), box=None)
    for name, row in found.items():
        table.add_row(name, *(str(row[column]) for column in columns))
    console = Console()
    console.print(table)
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
