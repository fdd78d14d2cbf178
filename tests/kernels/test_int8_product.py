"""Products with weights of 8 bits: Triton and its torch reference against float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from draftline.kernels.dispatch import Machine, load_int8_linear, runs_triton
from draftline.models.layers import linear_layers
from draftline.models.layers.linear_layers import Int8Linear
from support.inputs.attention import DEVICE
from torch.nn.functional import gelu, silu

# Of a result, and of the largest result, in whose size sums are rounded.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def layer(num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(num_outputs)
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), generator=random)
    scales = torch.rand(num_outputs, generator=random) + 0.1
    return weight.to(torch.int8).to(DEVICE), (scales / 127).to(DEVICE)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [
        (0, 16, 8), (1, 2, 1), (1, 70, 300), (5, 34, 256), (17, 48, 129), (65, 40, 100),
        (130, 10, 64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_equals_float64(
    name: str, activation: str | None, dtype: torch.dtype, num_rows: int, num_outputs: int,
    num_inputs: int,
) -> None:  # fmt: skip
    weight, scales = layer(num_outputs, num_inputs)
    wide = torch.randn(num_rows, num_inputs + 3, generator=torch.Generator().manual_seed(1))
    # Rows that do not lie one behind the other.
    x = wide.to(dtype).to(DEVICE)[:, :num_inputs]
    bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    wide_weight = weight.double() * scales.double()[:, None]
    for added in (None, bias):
        found = load_int8_linear(name)(x, weight, scales, added, activation=activation)
        assert found.dtype == dtype
        assert found.shape == (num_rows, num_outputs // (1 if activation is None else 2))
        exact = x.double() @ wide_weight.T + (0 if added is None else added.double())
        if activation is not None:
            left, right = exact.chunk(2, -1)
            is_silu = activation == "silu"
            exact = (silu(left) if is_silu else gelu(left, approximate="tanh")) * right
        if num_rows:
            error = (found.double() - exact).abs()
            assert (error <= BOUNDS[dtype] * (exact.abs() + 0.2 * exact.abs().max())).all()


def test_many_outputs_have_larger_tiles() -> None:
    weight, scales = layer(3200, 64)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found, expected = (
        load_int8_linear(name)(x, weight, scales) for name in ("triton", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_layers_on_gpus_have_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Machine((9, 0), has_triton=True, has_flash_attn=False)
    assert runs_triton(gpu)
    assert not runs_triton(Machine((7, 5), has_triton=True, has_flash_attn=False))
    assert not runs_triton(
        Machine(None, has_triton=True, has_flash_attn=False, is_interpreting=True)
    )
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ours = Int8Linear(weight)
    monkeypatch.setattr(linear_layers, "runs_triton", lambda machine: True)
    on_gpu = Int8Linear(weight)
    assert on_gpu.product is load_int8_linear("triton")
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    assert on_gpu(x).shape == (2, 3, 24)
    torch.testing.assert_close(on_gpu(x), ours(x), rtol=1e-4, atol=1e-4)


def test_both_have_one_signature() -> None:
    ours, theirs = (inspect.signature(load_int8_linear(name)) for name in ("triton", "reference"))
    assert ours == theirs
