"""Trees through layers that keep a state, against the recurrence path by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from draftline.kernels.dispatch import load_recurrence
from draftline.kernels.recurrence.tree_form import Columns, solve_path, solve_tree, state_after
from draftline.kernels.recurrence.walk import walk as torch_walk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.tools.cpu_kernels import load_cpu_kernels

KEY_DIM, VALUE_DIM = 6, 10
Array = NDArray[np.float32]
Walk = Callable[..., torch.Tensor]


@pytest.fixture(params=["walk", pytest.param("cpu_kernels", marks=pytest.mark.compiler)])
def walk(request: pytest.FixtureRequest) -> Walk:
    """The recurrence by either implementation."""
    if request.param == "cpu_kernels":
        load_cpu_kernels()
    return load_recurrence(request.param).solve


class Rows:
    """Random rows of `count` tokens: of one tree, with `parents`."""

    def __init__(
        self, seed: int, count: int, *, heads: int, group: int, channels: int,
        dims: tuple[int, int] = (KEY_DIM, VALUE_DIM),
    ) -> None:  # fmt: skip
        random = np.random.default_rng(seed)
        key_dim, value_dim = dims

        def normal(*shape: int) -> Array:
            return random.normal(size=shape).astype(np.float32)

        keys = normal(count, heads // group, key_dim)
        self.keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        self.queries = normal(count, heads // group, key_dim)
        self.values = normal(count, heads, value_dim)
        self.rates = random.random((count, heads)).astype(np.float32)
        self.log_decays = -random.random((count, heads, channels)).astype(np.float32)
        self.state = normal(heads, key_dim, value_dim)
        self.parents = [int(random.integers(-1, node)) if node else -1 for node in range(count)]

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @property
    def tree(self) -> list[list[int]]:
        """The order of all rows, each of which has a buffer."""
        return [[node, node, parent, node] for node, parent in enumerate(self.parents)]

    def walked(
        self, walk: Walk, order: list[list[int]], *, corrects: bool, deltas: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Outputs, deltas and the states behind."""
        states = torch.from_numpy(self.state[None].copy())
        deltas = np.zeros_like(self.values) if deltas is None else deltas
        keys, log_decays, values, rates, queries = self.tensors(
            [*range(len(self.keys))], "keys", "log_decays", "values", "rates", "queries"
        )
        outputs = walk(
            states, keys, log_decays, torch.from_numpy(deltas), values,
            rates if corrects else None, queries, torch.tensor(order, dtype=torch.int32),
        )  # fmt: skip
        return outputs.numpy(), deltas, states[0].numpy()

    def expected(self, path: list[int], *, corrects: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        """The output of a path's last token and the state behind it, by the definition."""
        group = len(self.state) // self.keys.shape[1]
        keys = self.keys.repeat(group, axis=1).astype(np.float64)
        queries = self.queries.repeat(group, axis=1).astype(np.float64)
        state, output = self.state.astype(np.float64), np.empty(0)
        for node in path:
            state = state * np.exp(self.log_decays[node].astype(np.float64))[:, :, None]
            delta = self.values[node].astype(np.float64)
            if corrects:
                found = np.einsum("hkv,hk->hv", state, keys[node])
                delta = self.rates[node][:, None] * (delta - found)
            state = state + keys[node][:, :, None] * delta[:, None]
            output = np.einsum("hkv,hk->hv", state, queries[node])
        return output, state

    def tensors(self, nodes: list[int], *names: str) -> list[torch.Tensor]:
        return [torch.from_numpy(getattr(self, name)[nodes]) for name in names]


KINDS = [
    pytest.param(1, True, id="gated delta"),
    pytest.param(KEY_DIM, True, id="decay of each channel"),
    pytest.param(1, False, id="mamba-2"),
]


@pytest.mark.parametrize(("channels", "corrects"), KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), count=st.integers(1, 24))
def test_each_node_has_the_numbers_of_its_path_alone(
    walk: Walk, channels: int, corrects: bool, seed: int, count: int
) -> None:
    rows = Rows(seed, count, heads=4, group=2, channels=channels)
    outputs, deltas, state = rows.walked(walk, rows.tree, corrects=corrects)
    np.testing.assert_array_equal(state, rows.state)
    for node in range(count):
        path = rows.path(node)
        wanted, after = rows.expected(path, corrects=corrects)
        np.testing.assert_allclose(outputs[node], wanted, atol=2e-5)
        # As a chunk of a prompt, which goes on in the request's state.
        chunk = [[other, other, -1, -1] for other in path]
        alone, _, left = rows.walked(walk, chunk, corrects=corrects)
        np.testing.assert_array_equal(outputs[node], alone[node])
        np.testing.assert_allclose(left, after, atol=2e-5)
        # What stays of the tokens brings the state to the same bits.
        known = [[other, -1, -1, -1] for other in path]
        _, _, replayed = rows.walked(walk, known, corrects=corrects, deltas=deltas)
        np.testing.assert_array_equal(replayed, left)


@pytest.mark.parametrize(("channels", "corrects"), KINDS)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 24), share=st.floats(0, 1))
def test_a_tree_is_one_system_also_behind_nodes_whose_deltas_are_known(
    channels: int, corrects: bool, seed: int, count: int, share: float
) -> None:
    rows = Rows(seed, count, heads=4, group=2, channels=channels)
    outputs, deltas, _ = rows.walked(torch_walk, rows.tree, corrects=corrects)
    known = int(share * (count - 1))
    sees = torch.zeros(count, count, dtype=torch.bool)
    for node in range(count):
        sees[node, rows.path(node)] = True
    state, every = torch.from_numpy(rows.state), [*range(count)]
    left = torch.from_numpy(deltas[:known])
    columns = Columns(*rows.tensors(every, "keys", "log_decays"), left, sees)
    values, rates, queries = rows.tensors(every[known:], "values", "rates", "queries")
    found, solved = solve_tree(state, columns, values, rates if corrects else None, queries)
    np.testing.assert_allclose(found, outputs[known:], atol=5e-5)
    np.testing.assert_allclose(solved, deltas[known:], atol=5e-5)
    path = rows.path(count - 1)
    parts = rows.tensors(path, "keys", "log_decays")
    after = state_after(state, *parts, torch.from_numpy(deltas[path]))
    np.testing.assert_allclose(after, rows.expected(path, corrects=corrects)[1], atol=5e-5)


@pytest.mark.parametrize(("channels", "corrects"), KINDS)
def test_a_long_path_is_solved_piece_by_piece(channels: int, corrects: bool) -> None:
    rows = Rows(1, 150, heads=2, group=1, channels=channels)
    chunk = [[node, node, -1, -1] for node in range(150)]
    outputs, _, state = rows.walked(torch_walk, chunk, corrects=corrects)
    *parts, rates, queries = rows.tensors(
        [*range(150)], "keys", "log_decays", "values", "rates", "queries"
    )
    given_rates = rates if corrects else None
    found, after = solve_path(torch.from_numpy(rows.state), *parts, given_rates, queries)
    np.testing.assert_allclose(found, outputs, atol=1e-4)
    np.testing.assert_allclose(after, state, atol=1e-4)


# Of whole vectors, of parts of one, and of more than one part of the work.
SIZES = [(6, 10), (128, 128), (33, 80), (16, 144)]


@pytest.mark.compiler
@pytest.mark.parametrize(("channels", "corrects"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("dims", SIZES)
def test_the_cpu_kernels_compute_the_recurrence(
    dims: tuple[int, int], channels: bool, corrects: bool
) -> None:
    load_cpu_kernels()
    rows = Rows(5, 40, heads=6, group=3, channels=dims[0] if channels else 1, dims=dims)
    # Branches leave their buffers to others, and two rows move the request's state.
    order: list[list[int]] = [[0, 0, -1, -1], [1, 1, -1, -1]]
    steps = [(-1, 0), (0, 1), (1, 1), (0, 0)]
    order += [[node, node, *steps[node % 4 - 2]] for node in range(2, 40)]
    own = load_recurrence("cpu_kernels").solve
    for found, expected in zip(
        rows.walked(own, order, corrects=corrects),
        rows.walked(torch_walk, order, corrects=corrects),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.compiler
def test_more_threads_give_the_same_bits() -> None:
    load_cpu_kernels()
    own = load_recurrence("cpu_kernels").solve
    rows = Rows(6, 30, heads=8, group=2, channels=1, dims=(32, 128))
    expected = rows.walked(own, rows.tree, corrects=True)
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for found, wanted in zip(
                rows.walked(own, rows.tree, corrects=True), expected, strict=True
            ):
                np.testing.assert_array_equal(found, wanted)
    finally:
        torch.set_num_threads(1)


@pytest.mark.compiler
def test_the_cpu_kernels_refuse_rows_that_are_not_there() -> None:
    load_cpu_kernels()
    rows = Rows(7, 3, heads=2, group=1, channels=1)
    for wrong in ([3, 0, -1, 0], [0, 3, -1, 0], [0, 0, -2, 0], [0, 0, -1, -2]):
        with pytest.raises(RuntimeError, match="no such row"):
            rows.walked(load_recurrence("cpu_kernels").solve, [wrong], corrects=True)


def test_what_is_computed_beside_a_row_does_not_change_it(walk: Walk) -> None:
    rows = Rows(3, 12, heads=4, group=2, channels=1)
    alone, _, _ = rows.walked(walk, [[7, 7, -1, 0]], corrects=True)
    beside = [[node, node, -1, -1] for node in range(5)] + [[9, 9, -1, 0]]
    # Before the others move the state.
    outputs, _, _ = rows.walked(walk, [[7, 7, -1, 3], *beside], corrects=True)
    np.testing.assert_array_equal(outputs[7], alone[7])
