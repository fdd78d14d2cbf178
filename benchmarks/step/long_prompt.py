"""What a long prompt does to answers that are being generated, by the share that prompts may take.

    python -m draftline.benchmarks.step.long_prompt

Streams decode over simulated stages (`simulated_pipeline.py`) whose time grows with rows and with
the place in the text; a prompt of 32,768 tokens arrives.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...core.engine import EngineCore
from ...core.errors import DraftlineError
from ...core.request.output import Delta
from ...core.request.request import Request, Sink
from ...core.request.sampling_params import SamplingParams
from ...core.request.stop import SilentStream, StopRule
from ...core.schedule.block_pool import BlockPool
from ...core.schedule.budget import NodeBudget, StepCost
from ...core.schedule.scheduler import Scheduler, SchedulerLimits
from ...core.schedule.shares.prefill_share import PrefillShare
from ...core.step.builder import load_kernels
from ...measure.records.record import machine
from .simulated_pipeline import VOCAB, CountingDrafters, SimulatedPipeline

RESULTS = Path(__file__).parents[1] / "results" / "long_prompt.json"
BLOCK_SIZE = 16
PROMPT_LEN = 64
STEP_ROWS = 512
NODES = 4
STAGE_S, ROW_S = 0.005, 0.00003
QUIET_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One share: seconds to the long prompt's first token, and between the streams' tokens.

    alone   p50 and p99 of the time between two deltas of a stream before the prompt came, ms
    beside  the same while it was read
    """

    share: float
    stages: int
    streams: int
    first_token_s: float
    alone: tuple[float, float]
    beside: tuple[float, float]


class Streams:
    """An engine whose requests note when they are told of tokens."""

    def __init__(self, share: float, stages: int, count: int, prompt_len: int) -> None:
        pipeline = SimulatedPipeline(stages, STAGE_S, ROW_S)
        rows = [1, STEP_ROWS]
        # As an engine measures it at its start: one step at a time.
        seconds = [stages * (STAGE_S + ROW_S * many) for many in rows]
        budget = NodeBudget(StepCost(rows, seconds))
        blocks = (prompt_len + 16384 * count) // BLOCK_SIZE
        limits = SchedulerLimits(
            max_running=count + 1,
            max_waiting=0,
            max_step_rows=STEP_ROWS,
            max_tree_nodes=NODES,
            max_probe_rows=0,
            num_groups=pipeline.max_in_flight,
        )
        scheduler = Scheduler(
            BlockPool(blocks, BLOCK_SIZE),
            limits,
            PrefillShare(share, lambda rows: float(budget.cost.seconds(0, rows)), stages),
        )
        drafters = CountingDrafters(NODES)
        self.core = EngineCore(pipeline, drafters, scheduler, budget, time.monotonic)
        self.times: dict[str, list[float]] = {}
        for index in range(count):
            self.add(f"stream-{index}", PROMPT_LEN, 8192)

    def add(self, name: str, prompt_len: int, tokens: int) -> None:
        """Queue a request."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        request = Request(
            request_id=name,
            prompt_ids=np.arange(prompt_len, dtype=np.int32) % VOCAB,
            params=params,
            seed=0,
            max_tokens=tokens,
            sink=self._sink(name),
        )
        self.core.add(request, StopRule(params, (), tokens, SilentStream()))

    def _sink(self, name: str) -> Sink:
        times = self.times.setdefault(name, [])

        def note(event: Delta | DraftlineError) -> None:
            assert isinstance(event, Delta)
            times.append(time.perf_counter())

        return note

    async def run_until(self, end: float, name: str = "") -> None:
        """Step until the time `end`, or the first token of a request."""
        while time.perf_counter() < end and not self.times.get(name):
            await self.core.step()

    def gaps(self, start: float, end: float) -> tuple[float, float]:
        """p50 and p99 of the time between deltas that came within these times, ms."""
        gaps = []
        for name, times in self.times.items():
            if name.startswith("stream"):
                ends = np.array([one for one in times if start <= one <= end])
                gaps.append(1e3 * np.diff(ends))
        p50, p99 = np.percentile(np.concatenate(gaps), [50, 99])
        return float(p50), float(p99)


async def measure(share: float, stages: int, count: int, prompt_len: int) -> Measured:
    """Let streams decode alone, then beside a long prompt."""
    streams = Streams(share, stages, count, prompt_len)
    await streams.run_until(time.perf_counter() + QUIET_S)
    warm = time.perf_counter()
    await streams.run_until(warm + QUIET_S)
    start = time.perf_counter()
    streams.add("long", prompt_len, 1)
    await streams.run_until(start + 600, "long")
    end = time.perf_counter()
    return Measured(
        share=share,
        stages=stages,
        streams=count,
        first_token_s=end - start,
        alone=streams.gaps(warm, start),
        beside=streams.gaps(start, end),
    )


def main(
    prompt_len: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 32768,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Measure the time between tokens beside a long prompt."""
    console = Console(highlight=False)
    load_kernels()
    cases = [
        (share, stages, count)
        for stages, count in ((1, 8), (4, 1), (4, 32))
        for share in (1.0, 0.35)
    ]
    results = [asyncio.run(measure(*case, prompt_len)) for case in cases]
    table = Table(
        "stages", "streams", "share", "first token s", "alone p50", "p99", "beside p50", "p99",
        "p99 beside / alone", box=None,
    )  # fmt: skip
    for one in results:
        times = [f"{value:.1f}" for value in (*one.alone, *one.beside)]
        ratio = f"{one.beside[1] / one.alone[1]:.2f}"
        cells = (one.stages, one.streams, one.share, f"{one.first_token_s:.1f}", *times, ratio)
        table.add_row(*map(str, cells))
    console.print(machine().line())
    console.print(table)
    content = {"machine": machine().fields(), "prompt_len": prompt_len,
               "results": [asdict(one) for one in results]}  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
