"""Trees through layers that keep a state, against the recurrence path by path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draftline.kernels.recurrence.tree_form import Columns, solve_path, solve_tree, state_after
from draftline.kernels.recurrence.walk import walk
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

KEY_DIM, VALUE_DIM = 6, 10
Array = NDArray[np.float32]


class Rows:
    """Random rows of `count` tokens: of one tree, with `parents`."""

    def __init__(self, seed: int, count: int, *, heads: int, group: int, channels: int) -> None:
        random = np.random.default_rng(seed)

        def normal(*shape: int) -> Array:
            return random.normal(size=shape).astype(np.float32)

        keys = normal(count, heads // group, KEY_DIM)
        self.keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        self.queries = normal(count, heads // group, KEY_DIM)
        self.values = normal(count, heads, VALUE_DIM)
        self.rates = random.random((count, heads)).astype(np.float32)
        self.log_decays = -random.random((count, heads, channels)).astype(np.float32)
        self.state = normal(heads, KEY_DIM, VALUE_DIM)
        self.parents = [int(random.integers(-1, node)) if node else -1 for node in range(count)]

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def walked(self, order: list[list[int]], *, corrects: bool) -> tuple[Array, Array, Array]:
        """Outputs, deltas and the states behind."""
        states, outputs = self.state[None].copy(), np.zeros_like(self.values)
        deltas = np.zeros_like(self.values)
        buffers = np.zeros((len(self.keys), KEY_DIM, VALUE_DIM), dtype=np.float32)
        walk(
            states, buffers, self.keys, self.log_decays, deltas, self.values, self.rates,
            self.queries, outputs, np.array(order, dtype=np.int32), corrects,
        )  # fmt: skip
        return outputs, deltas, states[0]

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
@given(seed=st.integers(0, 10**6), count=st.integers(1, 24))
def test_each_node_has_the_numbers_of_its_path_alone(
    channels: int, corrects: bool, seed: int, count: int
) -> None:
    rows = Rows(seed, count, heads=4, group=2, channels=channels)
    tree = [[node, node, parent, node] for node, parent in enumerate(rows.parents)]
    outputs, deltas, state = rows.walked(tree, corrects=corrects)
    np.testing.assert_array_equal(state, rows.state)
    for node in range(count):
        path = rows.path(node)
        wanted, after = rows.expected(path, corrects=corrects)
        np.testing.assert_allclose(outputs[node], wanted, atol=2e-5)
        # As a chunk of a prompt, which goes on in the request's state.
        chunk = [[other, other, -1, -1] for other in path]
        alone, _, left = rows.walked(chunk, corrects=corrects)
        np.testing.assert_array_equal(outputs[node], alone[node])
        np.testing.assert_allclose(left, after, atol=2e-5)
        # What stays of the tokens brings the state to the same bits.
        replayed = rows.state[None].copy()
        known = np.array([[other, -1, -1, -1] for other in path], dtype=np.int32)
        none = rows.values[:0], rows.rates[:0], rows.queries[:0], rows.values[:0]
        buffers = rows.state[:0]
        walk(replayed, buffers, rows.keys, rows.log_decays, deltas, *none, known, corrects)
        np.testing.assert_array_equal(replayed[0], left)


@pytest.mark.parametrize(("channels", "corrects"), KINDS)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 24), share=st.floats(0, 1))
def test_a_tree_is_one_system_also_behind_nodes_whose_deltas_are_known(
    channels: int, corrects: bool, seed: int, count: int, share: float
) -> None:
    rows = Rows(seed, count, heads=4, group=2, channels=channels)
    tree = [[node, node, parent, node] for node, parent in enumerate(rows.parents)]
    outputs, deltas, _ = rows.walked(tree, corrects=corrects)
    known = int(share * (count - 1))
    sees = torch.zeros(count, count, dtype=torch.bool)
    for node in range(count):
        sees[node, rows.path(node)] = True
    state, every = torch.from_numpy(rows.state), [*range(count)]
    left = torch.from_numpy(deltas[:known])
    columns = Columns(*rows.tensors(every, "keys", "log_decays"), left, sees)
    own = rows.tensors(every[known:], "values", "rates", "queries")
    found, solved = solve_tree(state, columns, *own, corrects=corrects)
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
    outputs, _, state = rows.walked(chunk, corrects=corrects)
    parts = rows.tensors([*range(150)], "keys", "log_decays", "values", "rates", "queries")
    found, after = solve_path(torch.from_numpy(rows.state), *parts, corrects=corrects)
    np.testing.assert_allclose(found, outputs, atol=1e-4)
    np.testing.assert_allclose(after, state, atol=1e-4)


def test_what_is_computed_beside_a_row_does_not_change_it() -> None:
    rows = Rows(3, 12, heads=4, group=2, channels=1)
    alone, _, _ = rows.walked([[7, 7, -1, 0]], corrects=True)
    beside = [[node, node, -1, -1] for node in range(5)] + [[9, 9, -1, 0]]
    # Before the others move the state.
    outputs, _, _ = rows.walked([[7, 7, -1, 3], *beside], corrects=True)
    np.testing.assert_array_equal(outputs[7], alone[7])
