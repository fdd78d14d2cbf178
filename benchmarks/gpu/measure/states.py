"""The recurrence of a layer that keeps states, alone; and steps of a hybrid stage."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from ....kernels.dispatch import Machine, load_recurrence, triton_obstacle
from ....kernels.recurrence.step_tables import RequestRows, StepTables, TablesCapacity
from ....models.layers.model_slice import ModelSlice
from ....models.recurrence.state_pool import StateShape
from ..findings import Findings
from ..floors import HeadShape, StateHeads, StepTraffic, attention_work, states_work
from ..instruments.stages import decode_step, random_slice, random_stage
from ..plan import StepCase
from ..setting import DTYPE, GpuSetting
from .steps import use_graphs

GROUP = "states of a layer"
# Rows of its last tree that a request's text has passed.
PASSED = 3


def measure_states(setting: GpuSetting, findings: Findings) -> None:
    """A gated delta rule for every case, whose contexts do not matter; then steps of a stage of
    random weights, without CUDA graphs and with them.
    """
    name = "tree_form" if triton_obstacle(Machine.of(setting.device)) else "triton"
    findings.note("recurrence", name)
    for case in setting.plan.states:
        what = f"{GROUP}, {case.name}"
        findings.attempt(what, partial(_measure, name, case, setting, findings))
    findings.attempt(setting.plan.hybrid.name, partial(_measure_stage, setting, findings))


def _measure_stage(setting: GpuSetting, findings: Findings) -> None:
    plan, device = setting.plan.hybrid, setting.device
    part = random_slice(plan.config(), plan.span, DTYPE, device, fused=False)
    heads = plan.shape().heads
    num_blocks = setting.num_blocks(plan.cases, heads.kv_bytes * part.num_kv_layers)
    stage, attention = random_stage(
        part, num_blocks, setting.block_size, setting.attention, plan.cases
    )
    findings.note(f"stage of {plan.name}", f"attention by {attention}")

    def measure(group: str) -> None:
        for case in plan.cases:
            step = decode_step(case, num_blocks, setting.block_size, plan.config().vocab_size)
            # Texts go on from what slots hold.
            known = np.stack([step.state_slots, step.state_slots], axis=1)
            stage.run(replace(step, state_loads=known))
            times = setting.clock.waited(partial(stage.run, step))
            findings.add(group, case.name, times, _stage_work(part, heads, case), order=case.order)

    measure(f"{plan.name}, without graphs")
    graphs = use_graphs(stage, plan.cases, setting)
    findings.note(f"graphs of {plan.name}", graphs)
    if not isinstance(graphs, str):
        measure(plan.name)


def _stage_work(part: ModelSlice, heads: HeadShape, case: StepCase) -> StepTraffic:
    """Weights once, KV of the contexts, and states of all requests read and written."""
    assert part.forward is not None
    rows = case.batch * case.rows_each
    modules = [*part.layers, part.head]
    weights = [
        weight for one in modules if isinstance(one, nn.Module) for weight in one.parameters()
    ]
    works = [states_work(_heads_of(shape), case.batch, rows) for shape in part.forward.state_shapes]
    works += [
        attention_work(heads, case.batch, case.rows_each, case.context_len)
    ] * part.num_kv_layers
    num_bytes = sum(weight.nbytes for weight in weights) + sum(work.num_bytes for work in works)
    flops = 2 * rows * sum(weight.numel() for weight in weights) + sum(work.flops for work in works)
    return StepTraffic(num_bytes, flops)


def _heads_of(shape: StateShape) -> StateHeads:
    return StateHeads(shape.num_heads, shape.num_key_heads, shape.key_dim, shape.value_dim)


def _measure(name: str, case: StepCase, setting: GpuSetting, findings: Findings) -> None:
    heads, device = setting.plan.state_heads, setting.device
    requests = [_rows(case, index) for index in range(case.batch)]
    num_rows = case.batch * case.rows_each
    tables = StepTables(TablesCapacity.exact(num_rows, requests, 0), 1, device)
    places = np.concatenate([one.columns for one in requests])
    none = np.empty(0, dtype=np.int64)
    tables.refill(requests, places, places[:, None], none, [(none, none)] * 2)
    kept = case.batch * (case.rows_each + PASSED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    arguments = (
        normal(case.batch, heads.num_heads, heads.key_dim, heads.value_dim),
        normal(kept, heads.num_key_heads, heads.key_dim) / heads.key_dim**0.5,
        -normal(kept, heads.num_heads, 1).abs(),
        normal(kept, heads.num_heads, heads.value_dim),
        normal(num_rows, heads.num_heads, heads.value_dim),
        normal(num_rows, heads.num_heads).sigmoid(),
        normal(num_rows, heads.num_key_heads, heads.key_dim),
    )
    solve = load_recurrence(name).solve
    times = setting.clock.on_device(lambda: solve(*arguments, tables))
    findings.add(
        GROUP, case.name, times, states_work(heads, case.batch, num_rows), order=case.order
    )


def _rows(case: StepCase, index: int) -> RequestRows:
    """A random tree, whose branches go on from one of the last six nodes."""
    random, count = np.random.default_rng(index), case.rows_each
    sees = np.eye(count, dtype=np.bool_)
    for node in range(1, count):
        sees[node] |= sees[random.integers(max(0, node - 6), node)]
    places = np.arange(count + PASSED) + index * (count + PASSED)
    rows = slice(index * count, (index + 1) * count)
    return RequestRows(index, places[:PASSED], places[PASSED:], sees, rows)
