"""Linear layers of heads on the CPU kernels: the same products, of rows of any shape."""

from __future__ import annotations

import pytest
import torch
from draftline.kernels.cpu import build
from draftline.models.layers.linear_layers import pack_linears
from support.tools.cpu_kernels import load_cpu_kernels
from torch import nn

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (1, 7, 2), (0,)])
def test_products_are_those_of_torch(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Linear(48, 70, bias=has_bias), "b": nn.Linear(70, 1)})
    x = torch.randn(*shape, 48)
    expected = module["b"](module["a"](x))
    pack_linears(module)
    assert module["a"].weight.ndim == 3, "packed"
    torch.testing.assert_close(module["b"](module["a"](x)), expected, atol=1e-5, rtol=1e-5)
    turned = module["a"](torch.randn(48, 5).t())
    assert turned.shape == (5, 70)


def test_other_layers_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    half = nn.Linear(8, 8, dtype=torch.bfloat16)
    pack_linears(half)
    assert half.weight.ndim == 2
    monkeypatch.setattr("draftline.models.layers.linear_layers.are_loaded", lambda: False)
    without = nn.Linear(8, 8)
    pack_linears(without)
    assert without.weight.ndim == 2
    assert build.are_loaded()
