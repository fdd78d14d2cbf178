"""The engine over stages that only take time: how busy it keeps them, how long a newcomer waits,
and what it costs itself.

    python -m draftline.benchmarks.step.simulated_pipeline

Stages of a set time stand in for the model, so that any number of them fits on one machine and
nothing but the engine is measured: scheduling, merging, building steps, walking, committing. A
newcomer is a request for one token beside those that decode; what it waits is its time to first
token beyond the time of all stages.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...core.arrays import ROOT
from ...core.engine import EngineCore
from ...core.errors import DraftlineError
from ...core.proposals import (
    DraftCost,
    Drafted,
    DraftRequest,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
)
from ...core.request.output import Delta
from ...core.request.request import Request, Sink
from ...core.request.sampling_params import SamplingParams
from ...core.request.stop import SilentStream, StopRule
from ...core.schedule.block_pool import BlockPool
from ...core.schedule.budget import NodeBudget
from ...core.schedule.scheduler import Scheduler, SchedulerLimits
from ...core.step.builder import load_kernels
from ...core.steps import StepInput, StepOutput
from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results" / "simulated_pipeline.json"
VOCAB = 4096
BLOCK_SIZE = 16
PROMPT_LEN = 64
# Nodes on the right path; the rest of a tree is wrong.
NUM_RIGHT = 3
NEWCOMERS = 20
# Attention makes a row of a long text dearer.
DOUBLE_AT = 16384


class SimulatedPipeline:
    """`num_stages` stages, each of which takes `stage_s` seconds for every step, in order.

    And `row_s` for each of its rows, twice as much for one that stands `DOUBLE_AT` tokens into its
    text. Its target counts: after token t comes t + 1.
    """

    def __init__(self, num_stages: int, stage_s: float, row_s: float = 0.0) -> None:
        self.max_in_flight = num_stages + (num_stages > 1)
        self.busy_s = 0.0
        self._stage_s = stage_s
        self._row_s = row_s
        self._free_at = [0.0] * num_stages

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Answer when the last stage would."""
        loop = asyncio.get_running_loop()
        ready = loop.time()
        seconds = self._stage_s + self._row_s * float((1.0 + step.positions / DOUBLE_AT).sum())
        for stage, free_at in enumerate(self._free_at):
            ready = max(ready, free_at) + seconds
            self._free_at[stage] = ready
        self.busy_s += seconds
        answer: asyncio.Future[StepOutput] = loop.create_future()
        loop.call_at(ready, answer.set_result, _count_on(step))
        return answer


def _count_on(step: StepInput) -> StepOutput:
    return StepOutput(
        step_id=step.step_id,
        target_tokens=(step.token_ids[step.logits_rows] + 1) % VOCAB,
        probe_ids=np.empty((0, 0), dtype=np.int32),
        scores=np.empty(0, dtype=np.float32),
    )


class CountingDrafters:
    """Costs next to nothing: a chain of right tokens with wrong ones beside it."""

    def __init__(self, num_nodes: int) -> None:
        right = min(NUM_RIGHT, num_nodes)
        offsets = np.r_[1 : right + 1, 100 : 100 + num_nodes - right].astype(np.int32)
        self._after = (np.arange(VOCAB, dtype=np.int32)[:, None] + offsets) % VOCAB
        wrong = np.maximum(ROOT, np.arange(num_nodes - right) // 4 - 1)
        self._parents = np.r_[ROOT : right - 1, wrong].astype(np.int32)
        self._log_probs = np.zeros(num_nodes, dtype=np.float32)
        self._last: dict[str, int] = {}

    def open(self, request: DraftRequest, at_once: Collection[str] | None = None) -> None:  # noqa: ARG002
        """Begin a request."""
        self._last[request.request_id] = int(request.token_ids[-1])

    def close(self, request_id: str, last: Sequence[StepCommit] = ()) -> None:  # noqa: ARG002
        """End a request."""
        del self._last[request_id]

    async def exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Collection[str]] | None = None,  # noqa: ARG002
    ) -> Mapping[str, Sequence[Proposal]]:
        """A tree for every query."""
        for commit in commits:
            self._last[commit.request_id] = int(commit.tokens[-1])
        return {query.request_id: [self._tree(query.request_id)] for query in queries}

    def costs(self) -> Mapping[str, DraftCost]:
        """They cost next to nothing."""
        return {"counting": DraftCost()}

    feature_drafters: frozenset[str] = frozenset()

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Nobody asked for any."""
        assert not rows

    remote: frozenset[str] = frozenset()

    stage_heads: tuple[str, ...] = ()

    def note_drafted(self, drafted: Sequence[Drafted]) -> None:
        """Nobody drafts there."""
        assert not drafted

    def _tree(self, request_id: str) -> Proposal:
        tokens = self._after[self._last[request_id]]
        return Proposal("counting", tokens, self._parents, self._log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`requests` requests at once, each with trees of `nodes` nodes."""

    stages: int
    stage_ms: float
    requests: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """While all requests of a load decode.

    step_ms           time from one step to the next
    utilisation       share of the time that a stage computed
    newcomer_wait_ms  what newcomers wait, in the order of what they waited; none without stages
                      that take time
    """

    load: Load
    steps: int
    step_ms: float
    utilisation: float
    newcomer_wait_ms: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The median round by `step_ms`, and the range of all."""

    median: Measured
    least_ms: float
    most_ms: float


class Bench:
    """An engine over simulated stages with a load that decodes."""

    def __init__(self, load: Load, tokens: int) -> None:
        self.pipeline = SimulatedPipeline(load.stages, load.stage_ms / 1e3)
        slots = PROMPT_LEN + tokens + load.nodes + 2 * BLOCK_SIZE
        pool = BlockPool((load.requests + 1) * -(-slots // BLOCK_SIZE), BLOCK_SIZE)
        limits = SchedulerLimits(
            max_running=load.requests + 1,
            max_waiting=0,
            max_step_rows=max(512, load.requests * (load.nodes + 1)),
            max_tree_nodes=load.nodes,
            max_probe_rows=0,
            num_groups=self.pipeline.max_in_flight,
        )
        drafters = CountingDrafters(load.nodes)
        scheduler = Scheduler(pool, limits)
        budget = NodeBudget(is_adaptive=False)
        self.core = EngineCore(self.pipeline, drafters, scheduler, budget, time.monotonic)
        self.waiting = {f"request-{index}" for index in range(load.requests)}
        self.has_finished = False
        for index, name in enumerate(sorted(self.waiting)):
            self.add(name, index, tokens, self._on_output)

    def add(self, name: str, first: int, tokens: int, sink: Sink) -> None:
        """Queue a request whose prompt counts from `first`."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        request = Request(
            request_id=name,
            prompt_ids=np.arange(first, first + PROMPT_LEN, dtype=np.int32),
            params=params,
            seed=0,
            max_tokens=tokens,
            sink=sink,
        )
        self.core.add(request, StopRule(params, (), tokens, SilentStream()))

    async def newcomers(self, count: int, apart_s: float) -> list[float]:
        """Seconds to the first token of `count` requests that come one after the other."""
        loop, rng, seconds = asyncio.get_running_loop(), random.Random(0), []
        for index in range(count):
            await asyncio.sleep(rng.random() * apart_s)
            done: asyncio.Future[None] = loop.create_future()
            start = loop.time()
            sink = partial(_set_done, done)
            self.add(f"newcomer-{index}", 1000 + 100 * index, 1, sink)
            await done
            seconds.append(loop.time() - start)
        return seconds

    def _on_output(self, event: Delta | DraftlineError) -> None:
        assert isinstance(event, Delta)
        self.waiting.discard(event.request_id)
        self.has_finished = self.has_finished or event.finish_reason is not None


def _set_done(done: asyncio.Future[None], _event: Delta | DraftlineError) -> None:
    if not done.done():
        done.set_result(None)


async def measure_newcomers(load: Load) -> list[float]:
    """What newcomers wait beside a load that decodes, milliseconds, least first."""
    bench = Bench(load, tokens=100_000)
    while bench.waiting:
        await bench.core.step()
    stages_s = load.stages * load.stage_ms / 1e3
    arriving = asyncio.ensure_future(bench.newcomers(NEWCOMERS, stages_s))
    while not arriving.done():
        await bench.core.step()
        await asyncio.sleep(0)
    return sorted(1e3 * (seconds - stages_s) for seconds in arriving.result())


async def measure(load: Load, tokens: int = 400) -> Measured:
    """Run a load from the last first token to the first finished answer."""
    bench = Bench(load, tokens)
    core, pipeline = bench.core, bench.pipeline
    while bench.waiting:
        await core.step()
    start, busy_s, num_steps = time.perf_counter(), pipeline.busy_s, core.num_steps
    while not bench.has_finished:
        await core.step()
    seconds = time.perf_counter() - start
    steps = core.num_steps - num_steps
    busy_s = pipeline.busy_s - busy_s
    while core.has_work:
        await core.step()
    return Measured(
        load=load,
        steps=steps,
        step_ms=1e3 * seconds / steps,
        utilisation=busy_s / seconds,
        newcomer_wait_ms=await measure_newcomers(load) if load.stage_ms else (),
    )


HOST = (
    Load(stages=1, stage_ms=0.0, requests=1, nodes=60),
    Load(stages=1, stage_ms=0.0, requests=8, nodes=16),
    Load(stages=1, stage_ms=0.0, requests=64, nodes=16),
    Load(stages=1, stage_ms=0.0, requests=256, nodes=4),
)
STAGES = tuple(
    Load(stages=stages, stage_ms=5.0, requests=requests, nodes=16)
    for stages in (2, 4, 8)
    for requests in (1, stages, 32)
)
# Slow stages most of which are idle.
SLOW = (Load(stages=4, stage_ms=20.0, requests=1, nodes=16),)


def _rounds(load: Load, count: int) -> Rounds:
    found = [asyncio.run(measure(load)) for _ in range(count)]
    found.sort(key=lambda one: one.step_ms)
    return Rounds(median=found[count // 2], least_ms=found[0].step_ms, most_ms=found[-1].step_ms)


def main(
    rounds: Annotated[int, typer.Option(help="Runs of each load; the median counts.")] = 5,
    host_only: Annotated[bool, typer.Option(help="Only stages that take no time.")] = False,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Measure the engine over simulated stages."""
    console = Console(highlight=False)
    load_kernels()
    loads = HOST if host_only else (*HOST, *STAGES, *SLOW)
    results = [_rounds(load, rounds) for load in loads]
    table = Table(
        "stages", "ms each", "requests", "nodes", "step ms", "range", "busy",
        "newcomer waits ms", "at most", box=None,
    )  # fmt: skip
    for found in results:
        one, load = found.median, found.median.load
        busy = f"{one.utilisation:.1%}" if load.stage_ms else "host only"
        cells = (load.stages, load.stage_ms, load.requests, load.nodes, f"{one.step_ms:.2f}")
        waits = one.newcomer_wait_ms
        ends = (f"{statistics.median(waits):.1f}", f"{max(waits):.1f}") if waits else ("", "")
        table.add_row(*map(str, cells), f"{found.least_ms:.2f} - {found.most_ms:.2f}", busy, *ends)
    console.print(machine().line())
    console.print(table)
    content = {
        "machine": machine().fields(),
        "rounds": rounds,
        "loads": [asdict(one) for one in results],
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
