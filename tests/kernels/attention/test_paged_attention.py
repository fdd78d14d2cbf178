"""Attention over paged KV: the Triton kernels and their torch reference against dense float64."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from draftline.kernels.attention.spec import AttentionShape, LayerSpec
from draftline.kernels.attention.step_layout import LayoutCapacity, PartialResults, StepLayout
from draftline.kernels.attention.tile_plan import TILE_LINES, SplitRule
from draftline.kernels.dispatch import load_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs.attention import BOUNDS, DEVICE, FP8, Case, Part, make_case, random_parents
from support.inputs.steps import make_step

IMPLEMENTATIONS = ["reference", "triton"]
# A split context, a tree of two words of bits, a tree partly in flight, two chunks, one token.
PARTS = [
    Part(333, parents=[-1, 0, 0, 1, 3]),
    Part(5, parents=random_parents(70)),
    Part(21, parents=random_parents(9, seed=1), in_flight=4),
    Part(0, num_rows=23),
    Part(30, num_rows=5),
    Part(17),
]
# head_dim, kv heads, share, window, softcap, block_size
MODELS = [
    (64, 2, 1, None, None, 16),
    (80, 1, 4, None, None, 4),
    (96, 1, 7, 11, None, 5),
    (128, 2, 2, None, 3.0, 16),
    (160, 1, 2, 40, None, 4),
    (256, 1, 4, 9, 2.0, 8),
    (8, 1, 20, None, None, 4),
]
NUMBERS = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, FP8),
    "fp8 by row": (torch.bfloat16, FP8),
}


def attend(name: str, case: Case, layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and log-sums, in tensors that were NaN."""
    out = torch.full_like(case.query[..., : case.shape.head_dim], torch.nan)
    sums = torch.full(case.query.shape[:2], torch.nan, device=DEVICE)
    load_ops(name).paged_attention(case.query, case.pairs, layout, case.spec, out, log_sums=sums)
    return out, sums


def assert_exact(case: Case, out: torch.Tensor, sums: torch.Tensor) -> None:
    expected, expected_sums = case.expected()
    scales = case.spec.scales
    bound = BOUNDS[out.dtype] * (1 if scales is None else float(scales.select(-2, 1).max()))
    np.testing.assert_allclose(out.double().cpu(), expected, rtol=0, atol=bound)
    np.testing.assert_allclose(sums.cpu(), expected_sums, rtol=1e-5, atol=1e-5)


# Every model in float32, and some in every format: the interpreter is slow.
CASES = [(model, "float32") for model in MODELS] + [
    (model, numbers) for model in (MODELS[1], MODELS[3], MODELS[5]) for numbers in NUMBERS
]


@pytest.mark.parametrize(("model", "numbers"), dict.fromkeys(CASES), ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_equals_dense_attention(name: str, model: tuple, numbers: str) -> None:
    head_dim, kv_heads, share, window, softcap, block_size = model
    dtype, stored = NUMBERS[numbers]
    scales = None
    if stored == FP8:
        scales = torch.tensor([[0.5, 0.25][:kv_heads], [2.0, 1.5][:kv_heads]], device=DEVICE)
    if numbers == "fp8 by row":
        num_slots = sum(-(-part.num_slots // block_size) for part in PARTS) * block_size
        random = torch.Generator().manual_seed(1)
        exponents = torch.randint(-3, 2, (num_slots, 2, kv_heads), generator=random)
        scales = torch.exp2(exponents.float()).to(DEVICE)
    case = make_case(
        PARTS,
        AttentionShape(kv_heads * share, kv_heads, head_dim),
        LayerSpec(head_dim**-0.5, window, softcap, scales),
        dtype=dtype, stored=stored, block_size=block_size,
    )  # fmt: skip
    assert_exact(case, *attend(name, case, case.layout()))


@pytest.mark.parametrize("numbers", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_latents_are_keys_and_values_of_all_heads(name: str, numbers: str) -> None:
    """Of three groups of 14 heads, with trees, chunks and a split context."""
    shape = AttentionShape.of_latents(42, 24, 8)
    assert (shape.num_kv_heads, shape.share) == (3, 14)
    case = make_case(PARTS, shape, LayerSpec(0.25), dtype=NUMBERS[numbers][0])
    assert_exact(case, *attend(name, case, case.layout()))


def test_both_implementations_have_one_signature() -> None:
    ours, theirs = load_ops("triton"), load_ops("reference")
    for name in ours.__slots__:
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(theirs, name))


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        context_len = draw(st.sampled_from([0, 1, 63, 64, 65, 200, 513]))
        if draw(st.booleans()):
            drawn.append(Part(context_len, num_rows=draw(st.integers(1, 40))))
        else:
            count = draw(st.integers(1, 12))
            parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
            in_flight = draw(st.integers(0, count - 1))
            drawn.append(Part(context_len, parents=parents, in_flight=in_flight))
    return drawn


@settings(max_examples=8)
@given(
    drawn=parts(),
    heads=st.sampled_from([(1, 1), (2, 3)]),
    window=st.none() | st.integers(1, 90),
    softcap=st.none() | st.floats(0.5, 30.0),
    split_lines=st.integers(0, 200),
)
def test_any_step(
    drawn: list[Part], heads: tuple[int, int], window: int | None, softcap: float | None,
    split_lines: int,
) -> None:  # fmt: skip
    shape = AttentionShape(heads[0] * heads[1], heads[0], 16)
    case = make_case(drawn, shape, LayerSpec(0.25, window, softcap), seed=len(drawn))
    assert_exact(case, *attend("triton", case, case.layout(split_lines)))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_that_sees_nothing_gets_zeros(name: str) -> None:
    shape = AttentionShape(2, 1, 16)
    case = make_case([Part(0, parents=[-1, -1])], shape, LayerSpec(0.25))
    tree = case.step.trees[0]
    assert tree is not None
    tree.ancestors[1] = 0
    case.pairs[int(tree.slots[1])] = torch.nan
    out, sums = attend(name, case, case.layout())
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()
    assert (sums[1] == -torch.inf).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_of_other_requests_are_left_alone(name: str) -> None:
    case = make_case(
        [Part(9, 3), Part(300, 2), Part(4, 1)], AttentionShape(2, 1, 16), LayerSpec(1.0)
    )
    layout = case.layout()
    layout.refill(case.step, only=[1])
    out, sums = attend(name, case, layout)
    assert out[[0, 1, 2, 5]].isnan().all()
    expected, _ = case.expected()
    np.testing.assert_allclose(out[3:5].cpu(), expected[3:5], rtol=0, atol=1e-5)
    assert sums[3:5].isfinite().all()


@pytest.mark.parametrize("lines", TILE_LINES)
def test_one_layout_serves_unlike_steps_at_the_same_addresses(lines: int) -> None:
    """As a CUDA graph needs it: launch sizes and addresses stay, whatever the step."""
    shape, spec = AttentionShape(2, 1, 16), LayerSpec(0.25)
    partials = PartialResults(shape, SplitRule(2, 256), 8, DEVICE)
    capacity = LayoutCapacity(64, 8, 64, 512, 2)
    layout = StepLayout(shape, capacity, 4, partials, tile_lines=lines, programs=3)
    tensors = [value for value in vars(layout).values() if isinstance(value, torch.Tensor)]
    before = [tensor.data_ptr() for tensor in tensors], layout.launch_items
    for steps in ([Part(700), Part(3, 30)], [Part(2, parents=[-1, 0])], [Part(8), Part(300)]):
        case = make_case(steps, shape, spec, seed=len(steps))
        layout.refill(case.step)
        out, sums = attend("triton", case, layout)
        assert_exact(case, out, sums)
    after = [tensor.data_ptr() for tensor in tensors], layout.launch_items
    assert before == after


@pytest.mark.parametrize("programs", [None, pytest.param(1, marks=pytest.mark.full), 3])
def test_whichever_item_of_a_split_tile_comes_last_merges_it(programs: int | None) -> None:
    """In the order of the context, bit by bit; what they count is 0 again for the next launch."""
    shape, spec = AttentionShape(4, 2, 16), LayerSpec(0.25, window=900)
    parts = [Part(1000, parents=random_parents(6)), Part(600, num_rows=9), Part(300), Part(5)]
    case = make_case(parts, shape, spec)
    fixed = {} if programs is None else {"tile_lines": 16, "programs": programs}
    layout = case.layout(**fixed)
    assert layout.num_lines > 0
    assert not layout.partials.arrived.any()
    first, sums = attend("triton", case, layout)
    assert_exact(case, first, sums)
    for seed in range(2):
        order = torch.randperm(layout.num_items, generator=torch.Generator().manual_seed(seed))
        layout.items[: layout.num_items] = layout.items[order.to(DEVICE)]
        # What other steps have left there is not read.
        layout.partials.out.fill_(torch.nan)
        layout.partials.sums.fill_(torch.nan)
        again, sums = attend("triton", case, layout)
        assert torch.equal(again, first)
        assert not layout.partials.arrived.any()


@pytest.mark.parametrize("sides", [(1, 1, 1, 1, 1), (3, 5, 7, 9, 3)])
def test_arrays_of_odd_sizes_are_aligned(sides: tuple[int, ...]) -> None:
    """Else Triton would compile a kernel for every mixture of alignments."""
    shape = AttentionShape(2, 1, 16)
    partials = PartialResults(shape, SplitRule(2, 3), 1, DEVICE)
    layout = StepLayout(shape, LayoutCapacity(*sides), 4, partials)
    first = layout.ancestors.data_ptr()
    for name in (
        "requests", "item_count", "items", "positions", "slots", "own_slots", "own_positions",
        "first_blocks", "blocks",
    ):  # fmt: skip
        assert (getattr(layout, name).data_ptr() - first) % 16 == 0


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_queries_and_results_may_be_views(name: str) -> None:
    case = make_case([Part(9, 3)], AttentionShape(4, 2, 16), LayerSpec(0.25))
    wide = torch.full((3, 9, 16), torch.nan, device=DEVICE)
    wide[:, 2:6] = case.query
    out = torch.full((3, 7, 16), torch.nan, device=DEVICE)
    load_ops(name).paged_attention(wide[:, 2:6], case.pairs, case.layout(), case.spec, out[:, 1:5])
    np.testing.assert_allclose(out[:, 1:5].cpu(), case.expected()[0], rtol=0, atol=1e-5)
    assert out[:, [0, 5, 6]].isnan().all()


@pytest.mark.parametrize("numbers", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_a_request_is_computed_alike_in_any_company(numbers: str) -> None:
    """Bit by bit: a tree, a chunk and a token, with tiles of one size."""
    shape, spec = AttentionShape(4, 1, 16), LayerSpec(0.25, window=300, softcap=20.0)
    parts = [Part(500, parents=random_parents(6)), Part(300, num_rows=17), Part(130), Part(40)]
    case = make_case(parts, shape, spec, dtype=NUMBERS[numbers][0], block_size=16)
    rule = SplitRule.of(shape, 4)
    partials = PartialResults(shape, rule, 4, DEVICE)
    among, _ = attend("triton", case, case.layout(rule.split_lines, tile_lines=rule.tile_lines))
    for index, rows in enumerate(case.requests):
        first, last = case.step.request_starts[index : index + 2]
        step = make_step([rows])
        for programs in (None, 2):
            layout = StepLayout(
                shape, LayoutCapacity(64, 4, 64, 256, 2), 16, partials,
                tile_lines=rule.tile_lines, programs=programs,
            )  # fmt: skip
            layout.refill(step)
            assert layout.num_lines > 0 or rows.context_len <= 128
            alone = torch.full_like(case.query[first:last], torch.nan)
            load_ops("triton").paged_attention(
                case.query[first:last], case.pairs, layout, spec, alone
            )
            assert torch.equal(alone, among[first:last])
