"""The Triton kernel of layers that keep states, against the torch form of the same equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draftline.kernels.recurrence import tree_form, tree_kernels
from draftline.kernels.recurrence.step_tables import RequestRows, StepTables, TablesCapacity
from support.inputs.attention import DEVICE
from torch import Tensor

NUM_SLOTS, NUM_KEPT = 5, 400
NO_MOVES = np.empty(0, dtype=np.int64)
# Heads, heads of keys, key_dim, value_dim.
SIZES = [(2, 1, 16, 40), (2, 2, 24, 16)]
KINDS = [
    pytest.param(False, True, id="gated delta"),
    pytest.param(True, True, id="decay of each channel"),
    pytest.param(False, False, id="mamba-2"),
]
# Of each request: rows that its text has passed, rows that are known, its own rows, whether those
# are a chunk.
STEPS = [
    [(0, 0, 1, False)],
    [(3, 0, 20, False), (0, 0, 33, True), (17, 0, 1, False)],
    [(0, 5, 14, False), (1, 18, 40, False), (5, 0, 2, True)],
]


class Step:
    """Random rows of some requests."""

    def __init__(
        self, parts: list[tuple[int, int, int, bool]], sizes: tuple[int, int, int, int],
        *, has_channels: bool, corrects: bool, seed: int = 0,
    ) -> None:  # fmt: skip
        self.random = np.random.default_rng(seed)
        heads, key_heads, key_dim, value_dim = sizes
        self.requests, free, first = [], self.random.permutation(np.arange(1, NUM_KEPT)), 0
        for slot, (committed, known, own, is_chunk) in enumerate(parts):
            places, free = free[: committed + known + own], free[committed + known + own :]
            sees = None if is_chunk else self.tree(known + own)
            rows = slice(first, first + own)
            first = rows.stop
            self.requests.append(
                RequestRows(
                    slot, places[:committed], places[committed:], sees, rows,
                    begins=is_chunk and not committed,
                )
            )  # fmt: skip
        self.num_rows = first
        self.states = self.normal(NUM_SLOTS, heads, key_dim, value_dim)
        self.keys = torch.nn.functional.normalize(self.normal(NUM_KEPT, key_heads, key_dim), dim=-1)
        self.log_decays = -self.normal(NUM_KEPT, heads, key_dim if has_channels else 1).abs() / 4
        self.deltas = self.normal(NUM_KEPT, heads, value_dim)
        self.values = self.normal(first, heads, value_dim)
        self.rates = self.normal(first, heads).sigmoid() if corrects else None
        self.queries = self.normal(first, key_heads, key_dim)

    def normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.normal(size=shape).astype(np.float32)).to(DEVICE)

    def tree(self, count: int) -> Any:
        sees = np.eye(count, dtype=np.bool_)
        for node in range(1, count):
            sees[node] |= sees[self.random.integers(max(0, node - 6), node)]
        return sees

    @property
    def tables(self) -> StepTables:
        """For more than the step."""
        capacity = TablesCapacity.exact(self.num_rows, self.requests, 0).rounded()
        tables = StepTables(capacity, 1, DEVICE)
        self.fill(tables)
        return tables

    def fill(self, tables: StepTables) -> None:
        places = np.concatenate([one.columns[len(one.columns) - _count(one) :]
                                 for one in self.requests])  # fmt: skip
        tables.refill(
            self.requests, places, places[:, None], np.zeros(1, dtype=np.int64),
            [(NO_MOVES, NO_MOVES)] * 2,
        )  # fmt: skip

    def run(self, solve: Any, tables: StepTables) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, deltas and states."""
        states, deltas = self.states.clone(), self.deltas.clone()
        outputs = solve(
            states, self.keys, self.log_decays, deltas, self.values, self.rates, self.queries,
            tables,
        )  # fmt: skip
        own = torch.cat(
            [deltas[one.columns[len(one.columns) - _count(one) :]]
             for one in self.requests if one.sees is not None]
            or [deltas[:0]]
        )  # fmt: skip
        return outputs, own, states


def _count(one: RequestRows) -> int:
    return one.rows.stop - one.rows.start


def assert_alike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("has_channels", "corrects"), KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("parts", STEPS)
def test_all_requests_of_a_step_are_solved_at_once(
    parts: list[tuple[int, int, int, bool]], sizes: tuple[int, int, int, int],
    has_channels: bool, corrects: bool,
) -> None:  # fmt: skip
    step = Step(parts, sizes, has_channels=has_channels, corrects=corrects)
    found = step.run(tree_kernels.solve_step, step.tables)
    assert_alike(found, step.run(tree_form.solve_step, step.tables))


def test_tables_are_refilled_in_place() -> None:
    first, second = (
        Step(parts, SIZES[0], has_channels=False, corrects=True) for parts in STEPS[1:]
    )
    capacity = TablesCapacity(64, 4, 128, 300, 3)
    tables = StepTables(capacity, 1, DEVICE)
    assert not tables.requests.any()
    for step in (first, second, first):
        step.fill(tables)
        found = step.run(tree_kernels.solve_step, tables)
        assert_alike(found, step.run(tree_form.solve_step, tables))


@pytest.mark.gpu
@pytest.mark.parametrize(("has_channels", "corrects"), KINDS)
def test_a_device_computes_it_at_the_size_of_models(has_channels: bool, corrects: bool) -> None:
    parts = [(4, 0, 65, False), (0, 30, 98, False), (0, 0, 150, True)]
    step = Step(parts, (32, 16, 128, 128), has_channels=has_channels, corrects=corrects)
    found = step.run(tree_kernels.solve_step, step.tables)
    expected = step.run(tree_form.solve_step, step.tables)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
