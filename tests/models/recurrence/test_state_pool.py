"""What layers keep of requests, driven through steps: each token has the bits of its text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from draftline.core.errors import StageError
from draftline.core.steps import StepInput
from draftline.kernels.dispatch import load_recurrence
from draftline.models.recurrence.state_pool import StatePool, StateShape
from draftline.models.stage.gpu_path import Capture, CudaCapture
from support.fakes.recorded_graph import RecordedGraphs
from support.inputs.steps import BLOCK_SIZE, PagedRequest, Rows, int32, make_step
from torch import Tensor

SHAPE = StateShape(
    num_channels=12, width=4, num_heads=4, num_key_heads=2, key_dim=5, value_dim=6, num_decays=1
)
WEIGHT = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32))
TEXT = [7, 3, 9, 3, 1, 8, 2, 6, 5]
LIKE = torch.empty(0)
FIRST, SECOND = PagedRequest([2, 9, 4, 1, 7, 12]), PagedRequest([3, 8, 5, 0, 6, 10])


def pool(num_rows: int = 64, recurrence: str = "walk", like: Tensor = LIKE) -> StatePool:
    rule = load_recurrence(recurrence)
    return StatePool([SHAPE, SHAPE], 3, num_rows, BLOCK_SIZE, like, rule)


def features(tokens: Sequence[int], name: int, *size: int) -> Tensor:
    """Numbers that depend on each token alone."""
    rows = [np.random.default_rng([name, token]).normal(size=size) for token in tokens]
    return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, *size))


def run(
    states: StatePool, requests: Sequence[Rows], slots: Sequence[int], moves: object = (),
    *, loads: object = (), saves: object = (),
) -> list[Tensor]:  # fmt: skip
    """What each request's rows get in the second layer, behind the convolution of the first."""
    step = replace(
        make_step(requests, moves=moves),
        state_slots=int32(slots),
        state_loads=int32(loads).reshape(-1, 2),
        state_saves=int32(saves).reshape(-1, 2),
    )
    tokens = step.token_ids.tolist()
    kept = states.begin(states.plan(step))
    inputs = kept.convolve(0, features(tokens, 0, 12), WEIGHT, None)
    for layer in (0, 1):
        # Below 1 in length. Functions of torch's may round a number otherwise at another place.
        keys, decays = features(tokens, 1 + layer, 2, 5) * 0.3, -features(tokens, 4, 4, 1).abs()
        rates = features(tokens, 3, 4).abs().clamp(max=1.0)
        values = inputs[:, :6, None].transpose(1, 2) * features(tokens, 5 + layer, 4, 6)
        inputs = kept.scan(layer, features(tokens, 7, 2, 5), keys, values, decays, rates)
        inputs = inputs.flatten(1)[:, :12].contiguous()
        if not layer:
            inputs = kept.convolve(1, inputs, WEIGHT, WEIGHT[:, 0])
    return list(inputs.split([len(rows.tokens) for rows in requests]))


def alone(*tokens: int) -> Tensor:
    """The last token of a text that is one chunk."""
    return run(pool(), [FIRST.chunk([*TEXT, *tokens], 0)], [0])[0][-1]


def assert_paths(found: Tensor, paths: Sequence[Sequence[int]]) -> None:
    for row, path in zip(found, paths, strict=True):
        torch.testing.assert_close(row, alone(*path), rtol=0, atol=0)


def moves_to(request: PagedRequest, rows: Sequence[int], start: int) -> list[tuple[int, int]]:
    """Rows, counted from the place of the text's next token on, come one behind the other."""
    slots = request.slots(start, 8)
    return [(int(slots[row]), int(slots[place])) for place, row in enumerate(rows) if row != place]


@pytest.mark.parametrize("cuts", [(9,), (4, 9), (1, 2, 9), tuple(range(1, 10))])
def test_a_text_in_any_chunks_has_the_bits_of_one(cuts: tuple[int, ...]) -> None:
    states, first, found = pool(), 0, []
    for cut in cuts:
        found += run(states, [FIRST.chunk(TEXT[first:cut], first)], [1])
        first = cut
    whole = run(pool(), [FIRST.chunk(TEXT, 0)], [0])[0]
    torch.testing.assert_close(torch.cat(found), whole, rtol=0, atol=0)


def test_nodes_and_what_follows_a_path_have_the_bits_of_a_text() -> None:
    states = pool()
    other = FIRST.chunk([4, 4, 1], 0)
    run(states, [other, SECOND.chunk(TEXT, 0)], [2, 0])
    # A root with two children; the second has two, of which the last has one.
    tree = SECOND.tree([10, 11, 12, 13, 14, 15], [-1, 0, 0, 2, 2, 4], 9)
    _, found = run(states, [FIRST.tree([5], [-1], 3), tree], [2, 0])
    assert_paths(found, [[10], [10, 11], [10, 12], [10, 12, 13], [10, 12, 14], [10, 12, 14, 15]])
    # The text goes over 10, 12 and 14; another token than 15 is the next root.
    moves = moves_to(SECOND, [0, 2, 4], 9)
    second = SECOND.tree([16, 17, 18], [-1, 0, 1], 12)
    [found, _] = run(states, [second, FIRST.tree([6], [-1], 4)], [0, 2], moves)
    assert_paths(found, [[10, 12, 14, 16], [10, 12, 14, 16, 17], [10, 12, 14, 16, 17, 18]])
    # Nothing was accepted: plain decoding.
    [found] = run(states, [SECOND.tree([19], [-1], 13)], [0])
    assert_paths(found, [[10, 12, 14, 16, 19]])
    # As a chunk, as where a text goes on.
    [found] = run(states, [SECOND.chunk([20, 21], 14)], [0])
    assert_paths(found, [[10, 12, 14, 16, 19, 20], [10, 12, 14, 16, 19, 20, 21]])


def test_nodes_go_on_from_nodes_of_earlier_steps_that_are_in_flight() -> None:
    states = pool()
    run(states, [FIRST.chunk(TEXT, 0)], [0])
    tokens, parents = [10, 11, 12, 13, 14], [-1, 0, 0, 1, 3]
    [found] = run(states, [FIRST.tree(tokens[:3], parents[:3], 9)], [0])
    assert_paths(found, [[10], [10, 11], [10, 12]])
    # The next chunk sees those of the first, whose root it computes again.
    whole = FIRST.tree(tokens, parents, 9)
    assert whole.tree is not None
    order = [1, 2, 0, 3, 4]
    mask = np.array([[0, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]], dtype=np.bool_)
    bits = np.packbits(mask, axis=1, bitorder="little").astype(np.uint64)
    own = [0, 3, 4]
    chunk = replace(
        whole,
        tokens=whole.tokens[own],
        positions=whole.tree.positions[own],
        slots=whole.tree.slots[own],
        tree=whole.tree._replace(
            ancestors=bits,
            slots=whole.tree.slots[order],
            positions=whole.tree.positions[order],
        ),
    )
    [found] = run(states, [chunk], [0])
    assert_paths(found, [[10], [10, 11, 13], [10, 11, 13, 14]])
    # The root goes on over 11 and 13; 14 is in flight.
    root = FIRST.tree([13, 14], [-1, 0], 11, in_flight=0)
    moves = moves_to(FIRST, [0, 1], 9)
    kept = whole.tree.slots[4]
    assert root.tree is not None
    below = replace(
        root,
        tokens=int32([13, 15]),
        positions=int32([11, 13]),
        slots=int32([root.slots[0], FIRST.slots(15, 1)[0]]),
        tree=root.tree._replace(
            ancestors=np.array([[2], [7]], dtype=np.uint64),
            slots=int32([kept, root.slots[0], FIRST.slots(15, 1)[0]]),
            positions=int32([12, 11, 13]),
        ),
    )
    [found] = run(states, [below], [0], moves)
    assert_paths(found, [[10, 11, 13], [10, 11, 13, 14, 15]])


def test_a_slot_serves_another_text_and_no_text_it_does_not_know() -> None:
    states = pool(num_rows=4)
    run(states, [FIRST.chunk([1, 2, 3], 0), SECOND.chunk([5], 0)], [0, 1])
    run(states, [SECOND.tree([6], [-1], 1)], [1])
    [found, _] = run(states, [FIRST.chunk(TEXT, 0), SECOND.tree([7], [-1], 2)], [0, 1])
    assert_paths(found[-1:], [[]])
    for wrong in (FIRST.tree([3], [-1], 5), FIRST.tree([3], [-1], 10)):
        with pytest.raises(StageError):
            run(states, [wrong], [0])
    with pytest.raises(StageError, match="engine"):
        run(states, [FIRST.chunk(TEXT, 0)], [])
    with pytest.raises(StageError):
        run(states, [SECOND.tree([3], [-1], 4)], [2])
    states.reset()
    with pytest.raises(StageError):
        run(states, [SECOND.tree([8], [-1], 3)], [1])


def test_rows_that_no_step_reads_any_more_make_room() -> None:
    states = pool(num_rows=16)
    size = states.num_bytes
    request = PagedRequest([*range(40)])
    run(states, [request.chunk(TEXT, 0)], [0])
    start = len(TEXT)
    for accepted in ([0, 2, 4], [0], [0, 1], [0, 2]) * 8:
        run(states, [request.tree([10, 11, 12, 13, 14], [-1, 0, 0, 2, 2], start)], [0])
        slots = request.slots(start, 5).tolist()
        moves = [(slots[row], slots[place]) for place, row in enumerate(accepted) if row != place]
        start += len(accepted)
        # An attempt without nodes between two trees moves what was accepted.
        run(states, [request.tree([15], [-1], start)], [0], moves)
        start += 1
    assert states.num_bytes == size


def test_a_text_goes_on_from_a_snapshot_with_the_bits_of_a_text() -> None:
    states = pool()
    run(states, [FIRST.chunk(TEXT[:4], 0)], [0], saves=[(0, 2)])
    run(states, [FIRST.chunk(TEXT[4:], 4)], [0])
    # Another one's end is kept in the same place while it is read.
    chunks = [SECOND.chunk(TEXT[4:], 4), FIRST.chunk([1, 2, 3, 4], 0)]
    found, _ = run(states, chunks, [1, 0], loads=[(2, 1)], saves=[(0, 2)])
    assert_paths(found[-1:], [[]])
    [found] = run(states, [SECOND.tree([10, 11], [-1, 0], 9)], [1])
    assert_paths(found, [[10], [10, 11]])
    [other] = run(states, [SECOND.chunk([5, 6], 4)], [1], loads=[(2, 1)])
    [whole] = run(pool(), [FIRST.chunk([1, 2, 3, 4, 5, 6], 0)], [0])
    torch.testing.assert_close(other, whole[4:], rtol=0, atol=0)


@pytest.mark.parametrize("recurrence", ["tree_form", "triton"])
def test_by_products_of_matrices_it_is_the_same_to_rounding(recurrence: str) -> None:
    tree = SECOND.tree([10, 11, 12, 13], [-1, 0, 0, 2], 9)
    after = SECOND.tree([14, 15], [-1, 0], 11)

    def found(recurrence: str) -> Tensor:
        states = pool(recurrence=recurrence)
        parts = run(states, [SECOND.chunk(TEXT, 0)], [0]) + run(states, [tree], [0])
        return torch.cat(parts + run(states, [after], [0], moves_to(SECOND, [0, 2], 9)))

    torch.testing.assert_close(found(recurrence), found("walk"), rtol=1e-4, atol=1e-4)


class StaticLayer:
    """A layer whose work on a step is captured once."""

    def __init__(self, states: StatePool, capture: Capture, like: Tensor) -> None:
        self._states, self._tables = states, states.static_tables(8, 3, 32)
        kept = states.begin_static(self._tables)
        sizes = (12,), (2, 5), (2, 5), (4, 6), (4, 1), (4,)
        self._inputs = [like.new_zeros(8, *size) for size in sizes]
        self._results = like.new_zeros(8, 12), like.new_zeros(8, 4, 6)

        def work() -> None:
            convolved, *rest = self._inputs
            self._results[0].copy_(kept.convolve(0, convolved, WEIGHT.to(like.device), None))
            self._results[1].copy_(kept.scan(0, *rest))

        self._replay = capture(work)

    def run(self, step: StepInput) -> list[Tensor]:
        plan = self._states.plan(step)
        assert self._tables.capacity.holds(plan.capacity)
        assert not plan.copies_states
        plan.fill(self._tables)
        count = len(step.token_ids)
        for own, given in zip(self._inputs, layer_inputs(step), strict=True):
            own[:count] = given
        self._replay()
        return [result[:count].clone() for result in self._results]


def layer_inputs(step: StepInput) -> list[Tensor]:
    """Of the convolution, and of the recurrence."""
    tokens = step.token_ids.tolist()
    queries, keys = features(tokens, 7, 2, 5), features(tokens, 1, 2, 5) * 0.3
    rates = features(tokens, 3, 4).abs().clamp(max=1.0)
    decays = -features(tokens, 4, 4, 1).abs()
    return [features(tokens, 0, 12), queries, keys, features(tokens, 5, 4, 6), decays, rates]


def assert_replays_equal_steps(capture: Capture, like: Tensor) -> None:
    def step_of(requests: Sequence[Rows], slots: Sequence[int], moves: object = ()) -> StepInput:
        return replace(make_step(requests, moves=moves), state_slots=int32(slots))

    def run_eagerly(states: StatePool, step: StepInput) -> list[Tensor]:
        kept = states.begin(states.plan(step))
        convolved, *rest = (given.to(like.device) for given in layer_inputs(step))
        return [kept.convolve(0, convolved, WEIGHT.to(like.device), None), kept.scan(0, *rest)]

    ours, theirs = (pool(recurrence="triton", like=like) for _ in range(2))
    static = StaticLayer(ours, capture, like)
    begin = step_of([SECOND.chunk(TEXT, 0), FIRST.chunk([4, 4, 1], 0)], [0, 2])
    for states in (ours, theirs):
        run_eagerly(states, begin)
    tree = SECOND.tree([10, 11, 12, 13, 14], [-1, 0, 0, 2, 2], 9)
    steps = [
        step_of([FIRST.tree([5], [-1], 3), tree], [2, 0]),
        step_of([SECOND.tree([16, 17], [-1, 0], 12)], [0], moves_to(SECOND, [0, 2, 4], 9)),
        step_of([FIRST.chunk([6, 7], 4), SECOND.tree([18], [-1], 13)], [2, 0]),
    ]
    for step in steps:
        for found, expected in zip(static.run(step), run_eagerly(theirs, step), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    kept, expected = ours.layers[0].states, theirs.layers[0].states
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="records the interpreter's kernels")
def test_a_graph_serves_every_step_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_replays_equal_steps(RecordedGraphs(monkeypatch), LIKE)


@pytest.mark.gpu
def test_a_cuda_graph_serves_every_step_that_fits() -> None:
    device = torch.device("cuda")
    assert_replays_equal_steps(CudaCapture(device), torch.empty(0, device=device))
