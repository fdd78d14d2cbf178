"""Norms, rotations and gates: Triton and its torch reference against float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from draftline.kernels.dispatch import ElementwiseOps, load_elementwise
from draftline.kernels.elementwise.reference import HeadNorms, KvTarget
from support.inputs.attention import DEVICE

IMPLEMENTATIONS = ["reference", "triton"]
# Half a unit in the last place of results, relative; float32 loses a little on the way.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Half of the least number of a type.
LEAST = {torch.float32: 1e-12, torch.float16: 2**-25, torch.bfloat16: 1e-12}
DTYPES = list(BOUNDS)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(DEVICE)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, size: torch.Tensor | float = 0) -> None:
    """`size`: of the summands of what may cancel out."""
    bound = BOUNDS[ours.dtype]
    error = (ours.double() - exact).abs()
    # Triton's interpreter cuts bfloat16 where GPUs round.
    bound *= 2 if ours.dtype == torch.bfloat16 and DEVICE.type == "cpu" else 1
    assert (error <= bound * exact.abs() * 1.01 + LEAST[ours.dtype] + 4e-7 * size).all(), (
        error.max()
    )


def exact_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale.double()


@pytest.mark.parametrize("size", [1, 48, 64, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_norm(name: str, dtype: torch.dtype, size: int) -> None:
    x = numbers(3, size, dtype=dtype)
    # So small that eps decides.
    x[1] *= 1e-4
    scale = numbers(size, dtype=torch.float32, seed=1)
    out = torch.full_like(x, torch.nan)
    expected = exact_norm(x, scale, 1e-5)
    load_elementwise(name).rms_norm(x, scale, 1e-5, out)
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_norm_after_adding(name: str, dtype: torch.dtype) -> None:
    """The sum is kept as it is rounded, and what is normalised is the rounded sum."""
    wide = torch.full((3, 100), torch.nan, dtype=dtype, device=DEVICE)
    x, residual = wide[:, 10:90], numbers(3, 80, dtype=dtype, seed=2)
    # Sums that every type holds: Triton's interpreter does not round bfloat16 as GPUs do.
    x.copy_(numbers(3, 80, dtype=dtype).mul(4).round() / 4)
    residual = residual.mul(4).round() / 4
    before, total = residual.clone(), x + residual
    scale, out = numbers(80, dtype=torch.float32, seed=1), torch.full_like(residual, torch.nan)
    load_elementwise(name).rms_norm(x, scale, 1e-6, out, residual)
    assert torch.equal(x, total)
    assert torch.equal(residual, before)
    assert_close(out, exact_norm(total, scale, 1e-6))
    assert wide[:, :10].isnan().all()
    assert wide[:, 90:].isnan().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_norms_of_heads_in_place(name: str) -> None:
    heads = numbers(4, 7, 16, dtype=torch.float32)
    before, scale = heads.clone(), numbers(16, dtype=torch.float32, seed=1)
    part = heads[:, 2:5]
    load_elementwise(name).rms_norm(part, scale, 1e-6, part)
    assert_close(part, exact_norm(before[:, 2:5], scale, 1e-6))
    assert torch.equal(heads[:, [0, 1, 5, 6]], before[:, [0, 1, 5, 6]])


@pytest.mark.parametrize("dim", [2, 16, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rotation(name: str, dtype: torch.dtype, dim: int) -> None:
    heads = numbers(3, 7, dim, dtype=dtype)
    before = heads.clone()
    angles = torch.rand(3, 1, dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    load_elementwise(name).rotate(heads[:, :5], cos, sin)
    old = before[:, :5].double()
    half = dim // 2
    turned = torch.cat((old[..., half:], old[..., :half]), -1)
    assert_close(heads[:, :5], old * cos.double() + turned * sin.double(), old.abs().max())
    assert torch.equal(heads[:, 5:], before[:, 5:])


def angles(num_rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as `FastAttention` takes them."""
    generator = torch.Generator().manual_seed(1)
    turns = torch.rand(num_rows, 1, dim // 2, generator=generator).to(DEVICE) * 6
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("dim", "stored"), [(16, "same"), (80, "same"), (16, "fp8"), (16, "by row")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_turning_and_storing_is_norms_rotation_and_store(
    dtype: torch.dtype, dim: int, stored: str, has_norms: bool
) -> None:
    """In one launch what the operators one after the other do: of 5 queries, 2 keys, 2 values."""
    cos_and_sin = angles(3, dim, dtype)
    is_fp8 = stored != "same"
    kind = torch.float8_e4m3fn if is_fp8 else dtype
    scales = numbers(2, 2, dtype=torch.float32).abs() + 0.5 if stored == "fp8" else None
    norms = HeadNorms(numbers(2, dim, dtype=torch.float32, seed=1), 1e-5) if has_norms else None
    slots = torch.tensor([4, -1, 2, 9], dtype=torch.int32, device=DEVICE)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name in IMPLEMENTATIONS:
        heads = numbers(3, 9, dim, dtype=dtype)
        pairs = torch.zeros(6, 2, 2, dim, device=DEVICE).to(kind)
        if stored == "by row":
            scales = torch.ones(6, 2, 2, device=DEVICE)
        ops = load_elementwise(name)
        ops.turn_and_store(heads, *cos_and_sin, norms, KvTarget(pairs, slots, scales))
        assert not pairs[[0, 1, 3, 5]].float().any()
        wide = pairs.float()
        if stored == "by row":
            assert scales is not None
            assert (scales[[0, 1, 3, 5]] == 1).all()
            wide *= scales[..., None]
            # Numbers of e4m3 from 256 to 448: all but the last bit of what it holds is used.
            assert (pairs[[4, 2]].float().abs().amax(-1) > 200).all()
        found.append((heads[:, :5].float(), wide))
    for theirs, ours in zip(*found, strict=True):
        # The interpreter cuts where torch rounds, and loses the carry where it rounds to FP8.
        unit, least = (0.5, 2.0**-8) if is_fp8 else (4 * BOUNDS[dtype], 0.0)
        bound = 8 * BOUNDS[dtype] + least
        torch.testing.assert_close(ours, theirs, rtol=1.01 * unit, atol=bound)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 48, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gate(name: str, dtype: torch.dtype, size: int, activation: str) -> None:
    both = numbers(3, 2 * size, dtype=dtype)
    # exp of these is 0 or infinite.
    both[0, 0], both[1, 0] = 1e4, -1e4
    out = torch.full((3, size), torch.nan, dtype=dtype, device=DEVICE)
    load_elementwise(name).gated(both, out, activation)
    left, right = both.double().chunk(2, -1)
    kind: dict[str, Any] = {"silu": torch.nn.SiLU(), "gelu_tanh": torch.nn.GELU("tanh")}
    # GELU's own sum cancels out far left of 0.
    assert_close(out, kind[activation](left) * right, 4 * right.abs())


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_rows(name: str) -> None:
    ops = load_elementwise(name)
    # What lies behind the rows that are not there would be overwritten.
    memory, scale = torch.full((4, 8), 7.0, device=DEVICE), torch.ones(8, device=DEVICE)
    none = memory[:0]
    ops.rms_norm(none, scale, 1e-6, none)
    ops.gated(torch.empty(0, 16, device=DEVICE), none, "silu")
    angles = torch.empty(0, 1, 4, device=DEVICE)
    ops.rotate(none.view(0, 2, 4), angles, angles)
    assert (memory == 7.0).all()


def test_both_implementations_have_one_signature() -> None:
    ours, theirs = load_elementwise("triton"), load_elementwise("reference")
    for name in ElementwiseOps.__slots__:
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(theirs, name))


@pytest.mark.parametrize("size", [1, 97, 5000])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_log_softmax(name: str, size: int) -> None:
    wide = numbers(5, size + 3, dtype=torch.float32)
    logits = wide[:, :size]
    logits[1] += 80.0
    logits[2, : size - 1] = -torch.inf
    out = torch.full((5, size), torch.nan, device=DEVICE)
    load_elementwise(name).log_softmax(logits, out)
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert torch.equal(out.isinf(), expected.isinf())
    finite = ~expected.isinf()
    assert ((out - expected)[finite].abs() <= 1e-5 + 1e-6 * expected[finite].abs()).all()


def test_a_rows_log_probabilities_do_not_depend_on_its_place() -> None:
    logits = numbers(4, 4999, dtype=torch.float32)
    among, alone = torch.empty_like(logits), torch.empty_like(logits[:1])
    ops = load_elementwise("triton")
    ops.log_softmax(logits, among)
    for row in range(4):
        ops.log_softmax(logits[row : row + 1].clone(), alone)
        assert torch.equal(alone[0], among[row])
