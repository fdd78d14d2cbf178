"""What messages could bring that tell stages of killed rows, before they compute them.

    python -m draftline.benchmarks.step.streaming.pruning

An upper bound: each stage hears of a kill one message's time after the answer that says so came,
whatever is in its queue, and finding and leaving out rows takes it nothing (`stage_line.py`). Runs
with and without such messages take turns over the same prompts. A change of any time makes other
slices, and other drafts behind them; how much of a gain that is, runs tell whose stages are merely
a hundredth quicker. What the first slices behind a miss wait for other steps is what one request
may gain; the host's work takes next to no time, so that it changes nothing by chance.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ....core.schedule.budget import load_choice
from ....core.step.builder import load_kernels
from ....deploy.ray_serve.runtime import quiet_libraries
from ....measure.records.record import machine
from ....measure.replay.recording import RecordedAnswer, Recording
from ....measure.simulate.cost_profile import read_cost_profile
from .cases import (
    BUNDLED,
    LOADED,
    PROMPTS_ALONE,
    PROMPTS_EACH,
    TEMPERATURES,
    Found,
    Load,
)
from .recordings import COPYING, recorded
from .replayed_stages import RunStep
from .run import measure
from .stage_line import PROFILE, StageTimes, row_seconds
from .tables import median_of, names_of, ratios

STAGES, TOGETHER = (4, 8), (1, 4)
NUDGE = 0.99
# Whether messages are sent, and a factor of stages' times, by the name of a run.
RUNS: Mapping[str, tuple[bool, float]] = {
    "without": (False, 1.0), "with": (True, 1.0), "nudged": (False, NUDGE)
}  # fmt: skip
HEAD = (
    "prompts", "T", "drafters", "stages", "requests", "without", "with", "with / without",
    "nudged / without", "nodes killed", "rows left out", "steps left out", "wait", "with",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Of a run.

    tokens_s  committed a second, of all requests together
    killed    share of the nodes
    rows      share of rows that stages left out, and
    steps     of steps that they left out wholly
    waits     share of a request's time that its first slices behind a miss waited for other steps
    """

    tokens_s: float
    killed: float
    rows: float
    steps: float
    waits: float


Runs = Mapping[str, Sequence[Pruned]]


def pruning_loads() -> Iterator[Load]:
    """One request and several, over some stages and more, as far as any is streamed: with as many
    requests as stages each has one step on its way."""
    for prompts, temperature, drafters, stages, together in product(
        (BUNDLED, COPYING), TEMPERATURES, LOADED, STAGES, TOGETHER
    ):
        if together < stages:
            yield Load(
                prompts=prompts, temperature=temperature, drafters=drafters, stages=stages,
                together=together,
            )  # fmt: skip


def drawn(load: Load, recording: Recording, index: int) -> Sequence[RecordedAnswer]:
    """The answers of a round, drawn anew for each."""
    count = PROMPTS_ALONE if load.together == 1 else PROMPTS_EACH * load.together
    return random.Random(index).sample(recording.answers, count)


def pruned(found: Found, steps: Sequence[RunStep], together: int) -> Pruned:
    """What was left out of these steps of so many requests."""
    rows = [(step.num_rows, count) for step in steps for count in step.passage.rows]
    num_rows = sum(total for total, _ in rows)
    waits = [step.passage.waited_s for step in steps for part in step.parts if part.is_first]
    seconds = steps[-1].spans[-1][1] - steps[0].spans[0][0]
    return Pruned(
        tokens_s=found.tokens_s,
        killed=found.killed,
        rows=sum(total - count for total, count in rows) / num_rows,
        steps=sum(not count for _, count in rows) / len(rows),
        waits=sum(waits) / seconds / together,
    )


def row_of(load: Load, runs: Runs) -> tuple[str, ...]:
    """A row of the table: medians of the rounds, ratios with their range."""
    told = runs["with"]
    return (
        *names_of(load),
        f"{median_of(runs['without'], 'tokens_s'):.1f}", f"{median_of(told, 'tokens_s'):.1f}",
        ratios(told, runs["without"], 3), ratios(runs["nudged"], runs["without"], 3),
        f"{median_of(told, 'killed'):.0%}", f"{median_of(told, 'rows'):.1%}",
        f"{median_of(told, 'steps'):.1%}", f"{median_of(runs['without'], 'waits'):.1%}",
        f"{median_of(told, 'waits'):.1%}",
    )  # fmt: skip


def _measured(
    load: Load,
    recording: Recording,
    rounds: int,
    times: StageTimes,
    run_one: partial[tuple[Found, Sequence[RunStep]]],
) -> Runs:
    runs: dict[str, list[Pruned]] = {name: [] for name in RUNS}
    for index in range(rounds):
        answers = drawn(load, recording, index)
        for name, (is_pruned, factor) in RUNS.items():
            own = replace(times, is_pruned=is_pruned, stage_s=times.stage_s * factor)
            found, steps = run_one(load, "streamed", recording, answers, own)
            runs[name].append(pruned(found, steps, load.together))
    return runs


def _fields(load: Load, runs: Runs) -> dict[str, object]:
    return {
        "load": asdict(load),
        "runs": {name: [asdict(one) for one in own] for name, own in runs.items()},
    }


def main(  # noqa: PLR0913 - one parameter an option
    *,
    rounds: Annotated[int, typer.Option(help="Rounds of other prompts.")] = 5,
    stage_ms: Annotated[float, typer.Option(help="Of a stage for a step.")] = 5.0,
    row_us: Annotated[
        float | None, typer.Option(help="Of a stage for each row; default: as of a 70B model.")
    ] = None,
    last_ms: Annotated[float, typer.Option(help="More, of the last stage.")] = 0.0,
    by_slowest: Annotated[
        bool, typer.Option(help="Tell the engine what the slowest stage takes.")
    ] = False,
    hop_ms: Annotated[float, typer.Option(help="Of a message.")] = 0.4,
    slowdown: Annotated[
        float, typer.Option(help="Seconds of this host's work for one of a quicker host.")
    ] = 1000.0,
    drafters: Annotated[str | None, typer.Option(help="Only these loads.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Only these loads.")] = None,
    together: Annotated[int | None, typer.Option(help="Only loads of so many requests.")] = None,
    recordings: Annotated[Path, typer.Option(help="Folder that keeps answers.")] = Path(
        "build/streaming"
    ),
    output: Annotated[Path | None, typer.Option(help="JSON.")] = None,
) -> None:
    """Measure, print, write."""
    quiet_libraries()
    console = Console(width=200, highlight=False)
    load_kernels()
    load_choice()
    profile = read_cost_profile(PROFILE)
    row_s = row_seconds(profile) if row_us is None else row_us / 1e6
    times = StageTimes(
        stage_s=stage_ms / 1e3, row_s=row_s, hop_s=hop_ms / 1e3, last_s=last_ms / 1e3,
        is_slowest_known=by_slowest,
    )  # fmt: skip
    run_one = partial(measure, profile=profile, slowdown=slowdown)
    began_at = time.monotonic()
    measured: list[tuple[Load, Runs]] = []
    for load in pruning_loads():
        if (
            drafters in {None, load.drafters}
            and temperature in {None, load.temperature}
            and together in {None, load.together}
        ):
            recording = recorded(recordings, load.prompts, load.temperature, None)
            measured.append((load, _measured(load, recording, rounds, times, run_one)))
            console.print("  ".join(row_of(*measured[-1])))
    table = Table(*HEAD, box=None)
    for load, runs in measured:
        table.add_row(*row_of(load, runs))
    console.print(table)
    console.print(f"{machine().line()}; {time.monotonic() - began_at:.0f} s")
    if output is not None:
        content = {
            "machine": machine().fields(), "times": asdict(times), "slowdown": slowdown,
            "rounds": rounds, "loads": [_fields(load, runs) for load, runs in measured],
        }  # fmt: skip
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
