"""Mixed requests of four tenants on real Ray, while something is killed, paused, filled or slowed.

    python -m draftline.benchmarks.serving.soak [--minutes 30 --fault-s 20]
        [--model-drafters]

Serves the demo model by `draftline serve` on a Ray cluster of two nodes on this machine: two
replicas of two stages with a drafter actor each, two HTTP replicas, two drafter servers of kind
retrieval, and a Redis for tenants, rates, usage and retrieval. Every request must end within its
deadline, with the text of plain decoding or a clear error; streams that lose their replica must go
on; nothing may be left. Prints tables, writes JSON; exits 1 if anything is wrong.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from .run import SoakSetting, print_report, report_of, soak

# Requests; so many more in shorter runs would only be refused.
A_MINUTE = 1000 / 30
RESULTS = Path(__file__).parents[2] / "results" / "soak.json"


def main(
    *,
    minutes: Annotated[float, typer.Option(help="How long requests are sent.")] = 30.0,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests of all tenants together; default: 1,000 in half an hour."),
    ] = None,
    fault_s: Annotated[float, typer.Option(help="Seconds from one fault to the next.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of requests and faults.")] = 0,
    replicas: Annotated[int, typer.Option(help="Replicas of the engine.")] = 2,
    stages: Annotated[int, typer.Option(help="Stages of each.")] = 2,
    model_drafters: Annotated[
        bool, typer.Option("--model-drafters", help="Small models of every kind draft, too.")
    ] = False,
    logs: Annotated[Path | None, typer.Option(help="Folder to keep Ray's logs in.")] = None,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Run one and judge it."""
    load_before = os.getloadavg()
    setting = SoakSetting(
        minutes=minutes,
        requests=round(minutes * A_MINUTE) if requests is None else requests,
        fault_s=fault_s,
        seed=seed,
        replicas=replicas,
        stages=stages,
        model_drafters=model_drafters,
        logs=logs,
    )
    report = report_of(setting, soak(setting), load_before)
    output.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)
    if report["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
