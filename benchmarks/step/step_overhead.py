"""What a step costs outside the model: scheduling, merging, walking, messaging, text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from ...cluster.config import EngineConfig
from ...cluster.engine.assembly import Assembly, local_pipeline, plan_model
from ...cluster.engine.engine_thread import EngineThread
from ...cluster.links.link import InprocLink
from ...cluster.transport.stage_spec import Pipeline, StageSpec
from ...core.arrays import ROOT
from ...core.proposals import Commit, DraftRequest, Proposal, Query
from ...core.request.output import OutputCollector
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...core.steps import StepInput, StepOutput
from ...measure.replay.tapped_pipeline import PassingPipeline

NUM_STEPS = 200


@dataclass(frozen=True, slots=True)
class StepOverhead:
    """Milliseconds a step: all of it, and what is left without the model's pass."""

    num_nodes: int
    step_ms: float
    outside_ms: float
    outside_p99_ms: float

    def line(self) -> str:
        """One line for people."""
        return (
            f"a step outside the model, batch 1, {self.num_nodes} nodes: median "
            f"{self.outside_ms:.2f} ms, p99 {self.outside_p99_ms:.2f} ms (the whole step "
            f"{self.step_ms:.1f} ms)"
        )

    def fields(self) -> dict[str, float]:
        """The same for JSON."""
        return asdict(self)


class _Bush:
    """A drafter that costs nothing: the same useless tree of `num_nodes` nodes each time."""

    name = "bush"
    memory_bytes = 0

    def __init__(self, num_nodes: int) -> None:
        index = np.arange(num_nodes, dtype=np.int32)
        parents = np.where(index < num_nodes // 4, ROOT, index // 2).astype(np.int32)
        parents = np.minimum(parents, index - 1)
        self._tree = Proposal(self.name, index + 1, parents, np.zeros(num_nodes, np.float32))

    def open(self, request: DraftRequest) -> None:
        pass

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:  # noqa: ARG002
        return [self._tree for _ in queries]

    def observe(self, commits: Sequence[Commit]) -> None:
        pass

    def close(self, request_id: str) -> None:
        pass


class _Stopwatch(PassingPipeline):
    """Notes when each step went in and came out."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.spans: list[tuple[float, float]] = []

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        start = time.perf_counter()
        result = super().submit(step)
        self.spans.append((start, time.perf_counter()))
        return result


def measure_overhead(num_nodes: int) -> StepOverhead:
    """Decode with a tree of `num_nodes` in every step; the local pipeline runs inside `submit`."""
    config = EngineConfig(model="demo", tree_nodes=num_nodes)
    plan = plan_model(config)
    watches: list[_Stopwatch] = []

    def pipeline(specs: Sequence[StageSpec]) -> Pipeline:
        watches.append(_Stopwatch(local_pipeline(specs)))
        return watches[-1]

    async def build() -> Assembly:
        return Assembly(plan, pipeline, [InprocLink(_Bush(num_nodes))])

    engine = EngineThread(build)
    engine.start()
    answer = OutputCollector("overhead")
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0, ignore_eos=True)
    prompt = list(range(1, 65))
    engine.add(
        *plan.request_factory().build(
            "overhead", prompt, params, answer.on_output, RequestOptions()
        )
    )
    answer.wait()
    engine.close()
    spans = watches[0].spans[NUM_STEPS // 10 :]
    outside = [1e3 * (start - end) for (_, end), (start, _) in pairwise(spans)]
    whole = [1e3 * (b - a) for (a, _), (b, _) in pairwise(spans)]
    return StepOverhead(
        num_nodes=num_nodes,
        step_ms=statistics.median(whole),
        outside_ms=statistics.median(outside),
        outside_p99_ms=float(np.percentile(outside, 99)),
    )
