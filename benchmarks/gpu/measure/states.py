"""The recurrence of a layer that keeps states, alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from ....kernels.dispatch import Machine, load_recurrence, triton_obstacle
from ....kernels.recurrence.step_tables import RequestRows, StepTables, TablesCapacity
from ..findings import Findings
from ..floors import states_work
from ..plan import StepCase
from ..setting import GpuSetting

GROUP = "states of a layer"
# Rows of its last tree that a request's text has passed.
PASSED = 3


def measure_states(setting: GpuSetting, findings: Findings) -> None:
    """A gated delta rule for every case, whose contexts do not matter."""
    name = "tree_form" if triton_obstacle(Machine.of(setting.device)) else "triton"
    findings.note("recurrence", name)
    for case in setting.plan.states:
        what = f"{GROUP}, {case.name}"
        findings.attempt(what, partial(_measure, name, case, setting, findings))


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
