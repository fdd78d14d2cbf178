"""Streamed trees beside round-based speculation and plain decoding; see `run.py`.

    python -m draftline.benchmarks.step.streaming

Stages take 5 ms a step, 29 us more for each row (what a row of a 70B model computes in one of 8
stages on an H200, as if nothing of that went on beside the reading of weights) and 0.4 ms for each
message (as Ray actors take, 16 rows over 3 stages). Answers are the demo model's own, recorded
once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ....core.speculation.policy import load_policy
from ....core.step.builder import load_kernels
from ....deploy.ray_serve.runtime import quiet_libraries
from ....measure.records import machine
from ....measure.replay.recording import RecordedAnswer, Recording
from ....measure.simulate.cost_profile import read_cost_profile
from .cases import (
    BUNDLED,
    COPYING,
    MODES,
    PROMPTS_ALONE,
    PROMPTS_EACH,
    TEMPERATURES,
    Found,
    StreamingLoad,
    StreamingResult,
    every_load,
    recorded,
)
from .replayed_stages import PROFILE, RunStep, StageTimes, row_seconds
from .report import HEAD, draw, rows
from .run import measure

RESULTS = Path(__file__).parents[2] / "results"
HUMANEVAL = "HumanEval"
# Of the picture, which shows a part from the middle.
PROMPTS_DRAWN = 3
DRAWN = StreamingLoad(
    prompts=BUNDLED, temperature=0.0, drafters="all training-free", stages=8, together=1
)  # fmt: skip


def _answers(
    load: StreamingLoad, recording: Recording, index: int, rounds: int
) -> Sequence[RecordedAnswer]:
    """Those of a round: no two rounds share any, as far as there are enough."""
    count = PROMPTS_ALONE if load.together == 1 else PROMPTS_EACH * load.together
    own = recording.answers[index::rounds]
    return own[:count] if len(own) >= count else recording.answers[:count]


def _measured(
    load: StreamingLoad,
    recording: Recording,
    rounds: int,
    run_one: partial[tuple[Found, Sequence[RunStep]]],
) -> StreamingResult:
    found: dict[str, list[Found]] = {mode: [] for mode in MODES}
    for index in range(rounds):
        answers = _answers(load, recording, index, rounds)
        for mode, own in found.items():
            own.append(run_one(load, mode, recording, answers)[0])
    return StreamingResult(load=load, found=found)


def _plot(
    recording: Recording, run_one: partial[tuple[Found, Sequence[RunStep]]], png: Path
) -> None:
    answers = recording.answers[:PROMPTS_DRAWN]
    titles = {"round-based": "rounds", "streamed": "streamed"}
    draw(
        {title: run_one(DRAWN, mode, recording, answers)[1] for title, mode in titles.items()}, png
    )


def main(  # noqa: PLR0913 - one parameter an option
    *,
    rounds: Annotated[int, typer.Option(help="Rounds of other prompts, in which modes turn.")] = 3,
    humaneval: Annotated[Path | None, typer.Option(help="Prompts of HumanEval, JSONL.")] = None,
    stage_ms: Annotated[float, typer.Option(help="Of a stage for a step.")] = 5.0,
    row_us: Annotated[
        float | None, typer.Option(help="Of a stage for each row; default: as of a 70B model.")
    ] = None,
    hop_ms: Annotated[float, typer.Option(help="Of a message.")] = 0.4,
    slowdown: Annotated[
        float, typer.Option(help="Seconds of this host's work for one of a quicker host.")
    ] = 1.0,
    drafters_here: Annotated[
        bool, typer.Option(help="Drafters take this host's time, none a device's of their own.")
    ] = False,
    drafters: Annotated[str | None, typer.Option(help="Only these loads.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of all loads; default: 0 and 1.")
    ] = None,
    recordings: Annotated[Path, typer.Option(help="Folder that keeps answers.")] = Path(
        "build/streaming"
    ),
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "streaming.json",
    plot: Annotated[Path | None, typer.Option(help="PNG of the time line.")] = None,
) -> None:
    """Measure, print, write."""
    quiet_libraries()
    console = Console(width=200, highlight=False)
    load_kernels()
    load_policy()
    profile = read_cost_profile(PROFILE)
    row_s = row_seconds(profile) if row_us is None else row_us / 1e6
    times = StageTimes(stage_s=stage_ms / 1e3, row_s=row_s, hop_s=hop_ms / 1e3)
    if drafters_here:
        profile = profile.model_copy(update={"drafters": {}})
    run_one = partial(measure, times=times, profile=profile, slowdown=slowdown)
    names = (BUNDLED, COPYING, *([HUMANEVAL] if humaneval else []))
    found: list[StreamingResult] = []
    began_at = time.monotonic()
    temperatures = TEMPERATURES if temperature is None else (temperature,)
    for load in every_load(names, temperatures):
        if drafters is not None and load.drafters != drafters:
            continue
        file = humaneval if load.prompts == HUMANEVAL else None
        recording = recorded(recordings, load.prompts, load.temperature, file)
        found.append(_measured(load, recording, rounds, run_one))
        console.print("  ".join(rows(found[-1:])[0]))
    table = Table(*HEAD, box=None)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
    console.print(f"{machine().line()}; {time.monotonic() - began_at:.0f} s")
    if plot is not None:
        _plot(recorded(recordings, DRAWN.prompts, 0.0, None), run_one, plot)
    content = {
        "machine": machine().fields(), "times": asdict(times), "slowdown": slowdown,
        "drafters_here": drafters_here, "rounds": rounds, "loads": [asdict(one) for one in found],
    }  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
