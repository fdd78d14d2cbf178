"""Decoding steps of stages of random weights, for who waits for their tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....core.steps import StepInput
from ....models.attention.kernel_attention import KernelBackend
from ....models.stage.gpu_path import CudaCapture, GraphOptions, GraphPath, uses_fused_modules
from ....models.stage.plain_path import PlainPath
from ....models.stage.stage import Stage
from ..findings import Findings, free_memory
from ..floors import StageShape, step_work
from ..instruments.clock import Clock, median_ms
from ..instruments.stages import decode_step, random_slice, random_stage
from ..plan import GpuModelPlan, StepCase
from ..setting import DTYPE, GpuSetting

AHEAD = 4


@dataclass(frozen=True, slots=True)
class StepHostTime:
    """Milliseconds of one step of a stage with the head.

    step_ms     for who waits for its tokens
    ahead_ms    of a step among `AHEAD` that are launched before the first is waited for, as
                stages of a pipeline do
    enqueue_ms  until the host has enqueued everything up to the logits
    span_ms     between an event before and one after that, on the device
    device_ms   of the whole step on the device, launched well ahead of it
    busy_ms     in which the device computes or copies; None where the profiler saw nothing
    """

    what: str
    step_ms: float
    ahead_ms: float
    enqueue_ms: float
    span_ms: float
    device_ms: float
    busy_ms: float | None

    @property
    def between_share(self) -> float:
        """Share of the step in which the device waits for the host: between graphs, where a step is
        one.
        """
        return max(0.0, 1 - self.device_ms / self.step_ms)

    @property
    def inside_share(self) -> float | None:
        """Share of its own time in which the device does nothing: gaps between kernels."""
        return None if self.busy_ms is None else max(0.0, 1 - self.busy_ms / self.device_ms)

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        shares = {"between_share": self.between_share, "inside_share": self.inside_share}
        return asdict(self) | shares


def measure_host(what: str, stage: Stage, step: StepInput, clock: Clock) -> StepHostTime:
    """Time of one step on the host; `what` names the step in findings."""

    def enqueue() -> object:
        return stage.logits(step, None, step.logits_rows)

    def run() -> object:
        return stage.run(step, None)

    def run_ahead() -> None:
        for answer in [stage.launch(step) for _ in range(AHEAD)]:
            assert not isinstance(answer, Tensor), "the stage has the head"
            answer()

    waited, busy = clock.waited(run), clock.busy(run)
    return StepHostTime(
        what=what,
        step_ms=median_ms(waited),
        ahead_ms=median_ms(clock.waited(run_ahead)) / AHEAD,
        enqueue_ms=median_ms(clock.enqueued(enqueue)),
        span_ms=median_ms(clock.spanned(enqueue)),
        device_ms=median_ms(clock.on_device(lambda: stage.launch(step))),
        busy_ms=None if busy is None else 1e3 * busy,
    )


# Shares of the time after which no further step of the whole model, and none at all, is begun.
WHOLE_UNTIL, PART_UNTIL = 0.7, 0.85


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage and what its cases need."""

    plan: GpuModelPlan
    shape: StageShape
    stage: Stage
    num_blocks: int

    def step(self, case: StepCase) -> StepInput:
        """The step of a case."""
        vocab_size = self.shape.vocab_size
        return decode_step(case, self.num_blocks, self.stage.block_size, vocab_size)

    def hidden(self, case: StepCase) -> Tensor | None:
        """What the stage before would hand on; None where there is none."""
        if self.shape.has_embed:
            return None
        rows = case.batch * case.rows_each
        where = self.stage.kv.data.device
        return torch.randn(rows, self.shape.hidden_size, dtype=DTYPE, device=where)


def measure_whole(setting: GpuSetting, findings: Findings) -> None:
    """The model of the goals: their steps and the host's time, without and with CUDA graphs where
    there are any; then all other steps.
    """
    plan = setting.plan
    loaded = _load(plan.whole, setting, findings)
    first = (plan.one_token, plan.tree)
    if _can_have_graphs(loaded, setting):
        eager = f"{plan.whole.name}, without graphs"
        _measure_goals(eager, first, loaded, setting, findings)
    _try_graphs(loaded, setting, findings)
    _measure_goals(plan.whole.name, first, loaded, setting, findings)
    rest = tuple(case for case in plan.whole.cases if case not in first)
    _measure_cases(rest, WHOLE_UNTIL, loaded, setting, findings)


def measure_part(setting: GpuSetting, findings: Findings) -> None:
    """Steps of a stage in the middle of a larger model, which takes and gives hidden states."""
    plan = setting.plan.part
    if setting.budget.is_over(PART_UNTIL):
        findings.skip(plan.name, _used_up(PART_UNTIL))
        return
    loaded = _load(plan, setting, findings)
    _try_graphs(loaded, setting, findings)
    _measure_cases(plan.cases, PART_UNTIL, loaded, setting, findings)


def _load(plan: GpuModelPlan, setting: GpuSetting, findings: Findings) -> LoadedStage:
    shape = plan.shape()
    fused = uses_fused_modules(setting.device, setting.attention)
    part = random_slice(plan.config(), plan.span, DTYPE, setting.device, fused=fused)
    # Fused weights are copies: what they were made of is still torch's, and no longer needed.
    free_memory()
    num_blocks = setting.num_blocks(plan.cases, shape.kv_bytes)
    if not num_blocks:
        raise MemoryError(f"{plan.name} fits, but the KV of none of its steps does")
    stage, attention = random_stage(
        part, num_blocks, setting.block_size, setting.attention, plan.cases
    )
    modules = "fused modules" if fused else "modules of transformers"
    findings.note(f"stage of {plan.name}", f"attention by {attention}; {modules}")
    return LoadedStage(plan, shape, stage, num_blocks)


def _measure_cases(
    cases: tuple[StepCase, ...], until: float,
    loaded: LoadedStage, setting: GpuSetting, findings: Findings,
) -> None:  # fmt: skip
    for case in cases:
        name = f"{loaded.plan.name}: {case.name}"
        needed = case.num_slots(setting.block_size)
        if needed > loaded.num_blocks * setting.block_size:
            findings.skip(name, "KV does not fit the memory")
        elif setting.budget.is_over(until):
            findings.skip(name, _used_up(until))
        elif not findings.attempt(
            name, lambda case=case: _measure_case(loaded.plan.name, case, loaded, setting, findings)
        ):
            free_memory()


def _measure_goals(
    group: str, cases: tuple[StepCase, ...],
    loaded: LoadedStage, setting: GpuSetting, findings: Findings,
) -> None:  # fmt: skip
    for case in cases:
        name = f"{group}: {case.name}"
        findings.attempt(
            name, lambda case=case: _measure_case(group, case, loaded, setting, findings)
        )
    case = setting.plan.one_token

    def host() -> None:
        what = f"{group}, {case.name}"
        found = measure_host(what, loaded.stage, loaded.step(case), setting.clock)
        findings.note(f"host, {group}", found.fields())

    findings.attempt(f"host, {group}", host)


def _measure_case(
    group: str, case: StepCase, loaded: LoadedStage, setting: GpuSetting, findings: Findings
) -> None:
    step, hidden = loaded.step(case), loaded.hidden(case)
    work = step_work(loaded.shape, case.batch, case.rows_each, case.context_len)
    times = setting.clock.waited(lambda: loaded.stage.run(step, hidden))
    token = findings.find(group, replace(case, nodes=0).name)
    note = f"{statistics.median(times) / token.seconds:.2f} x one token" if token else ""
    findings.add(group, case.name, times, work, note=note, order=case.order)


def _try_graphs(loaded: LoadedStage, setting: GpuSetting, findings: Findings) -> None:
    name = f"graphs of {loaded.plan.name}"
    cases = loaded.plan.cases
    findings.attempt(name, lambda: findings.note(name, use_graphs(loaded.stage, cases, setting)))


def _can_have_graphs(loaded: LoadedStage, setting: GpuSetting) -> bool:
    return setting.device.type == "cuda" and _with_own_kernels(loaded.stage) is not None


def _with_own_kernels(stage: Stage) -> tuple[PlainPath, KernelBackend] | None:
    """How the stage computes, if its attention is by draftline's own kernels."""
    path = stage.path
    if isinstance(path, PlainPath) and isinstance(path.attention, KernelBackend):
        return path, path.attention
    return None


def use_graphs(
    stage: Stage, cases: tuple[StepCase, ...], setting: GpuSetting
) -> dict[str, Any] | str:
    """Run the cases' steps by CUDA graphs from now on; what was captured, or why none is."""
    found = _with_own_kernels(stage)
    if found is None or setting.device.type != "cuda":
        return "none: they need a GPU, and attention by draftline's own kernels"
    options = GraphOptions(
        max_rows=max(case.batch * case.rows_each for case in cases),
        max_requests=max(case.batch for case in cases),
        max_positions=max(case.context_len + case.rows_each for case in cases),
    )
    path, backend = found
    graphs = GraphPath(
        path.part, path.kv, path.block_size, backend, path.taps, options,
        CudaCapture(setting.device), path.states,
    )  # fmt: skip
    stage.path = graphs
    return asdict(graphs.capture_all(time.monotonic))


def _used_up(share: float) -> str:
    return f"{share:.0%} of the time was used up"
