"""Decoding steps of stages of random weights, for who waits for their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.types import StepInput
from ...models.stage import Stage
from .findings import Findings, free_memory
from .floors import StageShape, step_work
from .measure_host import measure_host
from .plan import ModelPlan, StepCase
from .random_stage import random_slice, random_stage
from .setting import DTYPE, Setting
from .steps import decode_step

# Shares of the time after which no further step of the whole model, and none at all, is begun.
WHOLE_UNTIL, PART_UNTIL = 0.7, 0.85


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage and what its cases need."""

    plan: ModelPlan
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


def measure_whole(setting: Setting, findings: Findings) -> None:
    """The model of the goals: their steps, then host and idle time, then all other steps."""
    plan = setting.plan
    loaded = _load(plan.whole, setting, findings)
    first = (plan.one_token, plan.tree)
    for case in first:
        _measure_case(case, loaded, setting, findings)
    findings.attempt("host time", lambda: _host(loaded, setting, findings))
    rest = tuple(case for case in plan.whole.cases if case not in first)
    _measure_cases(rest, WHOLE_UNTIL, loaded, setting, findings)


def measure_part(setting: Setting, findings: Findings) -> None:
    """Steps of a stage in the middle of a larger model, which takes and gives hidden states."""
    plan = setting.plan.part
    if setting.budget.is_over(PART_UNTIL):
        findings.skip(plan.name, _used_up(PART_UNTIL))
        return
    loaded = _load(plan, setting, findings)
    _measure_cases(plan.cases, PART_UNTIL, loaded, setting, findings)


def _load(plan: ModelPlan, setting: Setting, findings: Findings) -> LoadedStage:
    shape = plan.shape()
    part = random_slice(plan.config(), plan.span, DTYPE, setting.device)
    num_blocks = setting.num_blocks(plan.cases, shape.kv_bytes)
    stage, attention = random_stage(part, num_blocks, setting.block_size, setting.attention)
    findings.facts[f"attention of {plan.name}"] = attention
    return LoadedStage(plan, shape, stage, num_blocks)


def _measure_cases(
    cases: tuple[StepCase, ...], until: float,
    loaded: LoadedStage, setting: Setting, findings: Findings,
) -> None:  # fmt: skip
    for case in cases:
        name = f"{loaded.plan.name}: {case.name}"
        needed = case.num_slots(setting.block_size)
        if needed > loaded.num_blocks * setting.block_size:
            findings.skip(name, "KV does not fit the memory")
        elif setting.budget.is_over(until):
            findings.skip(name, _used_up(until))
        elif not findings.attempt(
            name, lambda case=case: _measure_case(case, loaded, setting, findings)
        ):
            free_memory()


def _measure_case(
    case: StepCase, loaded: LoadedStage, setting: Setting, findings: Findings
) -> None:
    step, hidden = loaded.step(case), loaded.hidden(case)
    work = step_work(loaded.shape, case.batch, case.rows_each, case.context_len)
    times = setting.clock.waited(lambda: loaded.stage.run(step, hidden))
    findings.add(loaded.plan.name, case.name, times, work)


def _host(loaded: LoadedStage, setting: Setting, findings: Findings) -> None:
    case = setting.plan.one_token
    figure = findings.find(loaded.plan.name, case.name)
    assert figure is not None, "steps of goals come before"
    step = loaded.step(case)
    found = measure_host(loaded.stage, step, setting.clock, figure.seconds)
    findings.facts["host"] = replace(found, what=f"{loaded.plan.name}, {case.name}").fields()


def _used_up(share: float) -> str:
    return f"{share:.0%} of the time was used up"
