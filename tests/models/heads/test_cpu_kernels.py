"""Heads on the CPU kernels: products and norms of rows of any shape, near those of torch."""

from __future__ import annotations

import pytest
import torch
from draftline.kernels.cpu import build
from draftline.models.heads.cpu_kernels import use_cpu_kernels
from support.tools.cpu_kernels import load_cpu_kernels
from torch import Tensor, nn

pytestmark = pytest.mark.compiler
# Of the largest number of a row: two roundings to 8 bits, of weights and of inputs.
ROUNDING = 0.02


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    if expected.numel():
        assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (1, 7, 2), (0,)])
def test_products_are_near_those_of_torch(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(480, 70, bias=has_bias), torch.randn(*shape, 480)
    turned = torch.randn(480, 5).t()
    expected, of_turned = layer(x), layer(turned)
    use_cpu_kernels(layer)
    assert not torch.equal(layer(turned), of_turned), "rounded"
    assert_near(layer(x), expected)
    assert_near(layer(turned), of_turned)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (0,)])
def test_norms_are_those_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norms = nn.ModuleList([nn.RMSNorm(48, eps=1e-3), nn.RMSNorm(48)])
    x = torch.randn(*shape, 96)[..., :48]
    for norm in norms:
        norm.weight.data.normal_()
    expected = [norm(x) for norm in norms]
    use_cpu_kernels(norms)
    for norm, wanted in zip(norms, expected, strict=True):
        torch.testing.assert_close(norm(x), wanted, atol=1e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_others() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(100, 70), torch.randn(9, 100)
    use_cpu_kernels(layer)
    assert torch.equal(layer(x)[3:4], layer(x[3:4]))


@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_lost_alone(lost: float) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(100, 70), torch.randn(3, 100)
    use_cpu_kernels(layer)
    expected = layer(x)
    x[1, 7] = lost
    found = layer(x)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


def test_other_layers_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    half, broken = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)
    broken.weight.data[2, 3] = torch.nan
    for layer in (half, broken):
        use_cpu_kernels(layer)
        assert layer.weight.shape == (8, 8)
    monkeypatch.setattr("draftline.models.heads.cpu_kernels.are_loaded", lambda: False)
    without = nn.Linear(8, 8)
    use_cpu_kernels(without)
    assert without.weight.shape == (8, 8)
    assert build.are_loaded()
