"""Own attention on CPUs against torch's, and a row alike, bit by bit, in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.steps import StepInput
from draftline.models.attention.step_attention import PagedKv, StepAttention
from draftline.models.stage.cpu_path import computing
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.steps import BLOCK_SIZE, PagedRequest, Rows, make_step
from support.tools.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.compiler

NUM_BLOCKS = 200
# Query heads, key/value heads, head size: of whole vectors, of parts of one, and of more than one.
SHAPES = [(4, 2, 64), (6, 2, 24), (8, 1, 8), (3, 3, 80), (2, 1, 128)]
# Window and bound of the logits.
OPTIONS = [(None, None), (5, None), (None, 3.0), (9, 2.0)]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def parents_of(rng: np.random.Generator, count: int) -> list[int]:
    return [int(rng.integers(-1, node)) if node else -1 for node in range(count)]


def requests_of(rng: np.random.Generator, count: int) -> list[Rows]:
    """Chunks and trees behind contexts of any length, in scattered blocks."""
    blocks = rng.permutation(NUM_BLOCKS)
    each = NUM_BLOCKS // count
    found = []
    for index in range(count):
        request = PagedRequest(blocks[index * each : (index + 1) * each].tolist())
        start, rows = int(rng.integers(0, 100)), int(rng.integers(1, 30))
        if rng.integers(2):
            found.append(request.tree([5] * rows, parents_of(rng, rows), start))
        else:
            found.append(request.chunk([5] * rows, start))
    return found


class Layer:
    """A layer with a cache full of noise, and heads for as many rows as a test has."""

    def __init__(self, shape: tuple[int, int, int], options: tuple[int | None, float | None]):
        self.num_heads, self.kv_heads, self.dim = shape
        self.options = options
        torch.manual_seed(0)
        self.kv = PagedKv(1, NUM_BLOCKS * BLOCK_SIZE, self.kv_heads, self.dim)
        self.kv.data.normal_()

    def heads(self, step: StepInput) -> torch.Tensor:
        """A row's heads are a function of its slot, so that a step need not say whose they are."""
        torch.manual_seed(1)
        size = (NUM_BLOCKS * BLOCK_SIZE, self.num_heads + 2 * self.kv_heads, self.dim)
        return torch.randn(size)[torch.from_numpy(step.slots).long()]

    def own(self, step: StepInput) -> torch.Tensor:
        with computing(step, self.kv, BLOCK_SIZE):
            return torch.ops.draftline.attend(
                self.heads(step), 0, self.num_heads, 0.3, *self.options
            )

    def reference(self, step: StepInput) -> torch.Tensor:
        heads, count = self.heads(step), len(step.token_ids)
        attention = StepAttention(step, self.kv, BLOCK_SIZE)
        attention.write(0, heads[:, self.num_heads :].view(count, 2, self.kv_heads, self.dim))
        out = attention.attend(0, heads[:, : self.num_heads], 0.3, *self.options)
        return out.reshape(count, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_reference(
    shape: tuple[int, int, int], options: tuple[int | None, float | None]
) -> None:
    rng = np.random.default_rng(shape[2])
    layer = Layer(shape, options)
    for count in (1, 3, 5):
        step = make_step(requests_of(rng, count))
        torch.testing.assert_close(layer.own(step), layer.reference(step), rtol=0, atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES), st.sampled_from(OPTIONS))
def test_a_row_is_the_same_bit_by_bit_in_any_company(
    seed: int, shape: tuple[int, int, int], options: tuple[int | None, float | None]
) -> None:
    rng = np.random.default_rng(seed)
    layer = Layer(shape, options)
    requests = requests_of(rng, int(rng.integers(2, 6)))
    together = layer.own(make_step(requests))
    first = 0
    for rows in requests:
        last = first + len(rows.tokens)
        assert torch.equal(layer.own(make_step([rows])), together[first:last])
        for row in rng.integers(0, last - first, 3).tolist():
            alone = layer.own(make_step([only(rows, row)]))
            assert torch.equal(alone[0], together[first + row])
        first = last


def only(rows: Rows, row: int) -> Rows:
    """One row of a request by itself: the others' KV is in the cache, what it sees is the same."""
    own = slice(row, row + 1)
    if rows.tree is None:
        context = rows.context_len + row
        return replace(
            rows, tokens=rows.tokens[own], positions=rows.positions[own], slots=rows.slots[own],
            context_len=context,
        )  # fmt: skip
    tree = rows.tree._replace(ancestors=rows.tree.ancestors[own])
    return replace(
        rows, tokens=rows.tokens[own], positions=rows.positions[own], slots=rows.slots[own],
        tree=tree,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [21, 60, 64])
def test_a_path_is_the_same_bit_by_bit_with_siblings_between_and_without(
    shape: tuple[int, int, int], start: int
) -> None:
    """What plain decoding computes is what a tree's path computes, wherever its nodes stand."""
    layer = Layer(shape, (None, None))
    rng = np.random.default_rng(3)
    request = PagedRequest(range(40))
    path = [0, 3, 4, 9, 10, 17, 30]
    parents = parents_of(rng, 31)
    for parent, node in zip([-1, *path], path, strict=False):
        parents[node] = parent
    rows = request.tree([5] * 31, parents, start)
    of_tree = layer.own(make_step([rows]))[path]
    # The path's keys and values move to where a chunk has them.
    moved = request.slots(start, len(path))
    chunk = replace(request.chunk([5] * len(path), start), slots=rows.slots[path], blocks=range(40))
    layer.kv.data[:, torch.from_numpy(moved).long()] = layer.kv.data[
        :, torch.from_numpy(rows.slots[path]).long()
    ].clone()
    plain = layer.own(make_step([chunk]))
    assert torch.equal(plain, of_tree)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_threads_change_no_bit(threads: int, count: int) -> None:
    """Neither do heads that are shared out among threads, as where requests are few."""
    layer = Layer((6, 3, 64), (None, None))
    step = make_step(requests_of(np.random.default_rng(7), count))
    one = layer.own(step)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(layer.own(step), one)
    finally:
        torch.set_num_threads(1)


def test_a_layer_of_another_step_is_refused(tmp_path: Path) -> None:
    layer = Layer((4, 2, 64), (None, None))
    heads = layer.heads(make_step([PagedRequest([1]).chunk([5, 6], 0)]))
    with (
        computing(make_step([PagedRequest([1]).chunk([5], 0)]), layer.kv, BLOCK_SIZE),
        pytest.raises(RuntimeError, match="another step"),
    ):
        torch.ops.draftline.attend(heads, 0, 4, 0.3, None, None)
