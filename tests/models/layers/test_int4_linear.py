"""Products with weights of 4 bits."""

from __future__ import annotations

import pytest
import torch
from draftline.models.layers.int4_linear import GROUP_SIZE, Int4Linear, fits_int4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight = torch.randn(48, 3 * GROUP_SIZE)
    weight[:, :GROUP_SIZE] *= 100
    layer = Int4Linear(weight)
    layer.bias = torch.nn.Parameter(torch.randn(48).to(dtype))
    read = layer(torch.eye(96, dtype=dtype)).float().T - layer.bias.float()[:, None]
    # A step is a fifteenth of what is between a group's least and largest.
    groups = weight.reshape(48, 3, GROUP_SIZE)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (read.reshape(48, 3, GROUP_SIZE) - groups).abs().amax(-1)
    assert (error <= 0.5 * step + 0.02 * groups.abs().amax(-1)).all()
    x = torch.randn(2, 5, 96)
    out = layer(x.to(dtype))
    assert out.shape == (2, 5, 48)
    assert out.dtype == dtype
    expected = x @ read.T + layer.bias.float()
    torch.testing.assert_close(
        out.float(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item()
    )
    assert layer.packed.nbytes + layer.scales.nbytes < weight.to(torch.bfloat16).nbytes / 2.5


@pytest.mark.parametrize("shape", [(40, 32), (48, 40)])
def test_other_shapes_stay_as_they_are(shape: tuple[int, int]) -> None:
    assert not fits_int4(torch.empty(shape))
    assert fits_int4(torch.empty(48, 64))
