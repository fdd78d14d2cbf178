"""The experts of a mixture equal their formula, and a row is the same in any company."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from draftline.kernels.cpu.build import vectors
from draftline.kernels.cpu.experts import Activation, ExpertMatrix, Gate, run_experts, stacked
from draftline.kernels.cpu.packed_linear import PackedWeight, pack_quantized, pack_weights
from draftline.models.load.quantized_layouts import QuantizedWeight
from support.inputs.random_weights import quantized
from support.tools.cpu_kernels import load_cpu_kernels
from torch import Tensor

pytestmark = pytest.mark.compiler

EXPERTS, CHOICES, HIDDEN, WIDTH = 6, 3, 160, 72
GATES = {
    "silu": Gate(Activation.SWISH), "gelu": Gate(Activation.GELU_TANH),
    "limited": Gate(Activation.SWISH, limit=0.5),
    "of gpt-oss": Gate(Activation.SWISH, alpha=1.702, limit=0.5, shift=1.0),
    "no gate": Gate(Activation.SQUARED_RELU),
}  # fmt: skip
KINDS = ["float32", "bfloat16", "int8", "uint8", "4 bits", "4 bits with minima", "e4m3", "e2m1"]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def weights(kind: str, groups: str, inputs: int, outputs: int) -> tuple[PackedWeight, Tensor]:
    """Of all experts, and their values [experts, outputs, inputs]."""
    panel, packs, values = vectors().panel, [], []
    for _ in range(EXPERTS):
        if kind in ("float32", "bfloat16"):
            value = torch.randn(outputs, inputs).to(getattr(torch, kind)).float() / inputs**0.5
            packs.append(pack_weights([value.t()], panel))
        else:
            one: QuantizedWeight = quantized(kind, groups, inputs, outputs)
            value = one.dequantized(torch.float32)
            small = pack_quantized(
                one.codes, one.scales, one.zeros, one.group_of, vectors(), one.minima
            )
            assert small is not None
            packs.append(small)
        values.append(value)
    stack = stacked(packs)
    assert stack is not None
    return stack, torch.stack(values)


class Layer(NamedTuple):
    up: ExpertMatrix
    down: ExpertMatrix
    gate: Gate
    up_values: Tensor
    down_values: Tensor

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return run_experts(x, chosen, shares, EXPERTS, self.up, self.down, self.gate)

    def by_torch(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, share in zip(chosen[row].tolist(), shares[row], strict=True):
                if not 0 <= expert < EXPERTS:
                    continue
                between = self.up_values[expert] @ x[row]
                if self.up.bias is not None:
                    between += self.up.bias[expert]
                halves = between.split(WIDTH)
                result = self.down_values[expert] @ self.gate(
                    halves[0], halves[1] if len(halves) > 1 else None
                )
                if self.down.bias is not None:
                    result += self.down.bias[expert]
                out[row] += share * result
        return out


def layer(
    kind: str = "float32", gate: str = "silu", groups: str = "32", *, biased: bool = False,
    apart: bool = False,
) -> Layer:  # fmt: skip
    """`apart`: gates and the others are in stacks of their own."""
    torch.manual_seed(0)
    widths = (WIDTH,) if gate == "no gate" else (WIDTH, WIDTH) if apart else (2 * WIDTH,)
    stacks, values = zip(*(weights(kind, groups, HIDDEN, width) for width in widths), strict=True)
    down, down_values = weights(kind, groups, WIDTH, HIDDEN)
    biases = [torch.randn(EXPERTS, size) if biased else None for size in (sum(widths), HIDDEN)]
    return Layer(
        ExpertMatrix(stacks, widths, biases[0]), ExpertMatrix((down,), (HIDDEN,), biases[1]),
        GATES[gate], torch.cat(values, dim=1), down_values,
    )  # fmt: skip


def routed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, experts (also such as are none) and shares of so many rows."""
    torch.manual_seed(rows)
    chosen = torch.stack([torch.randperm(EXPERTS + 1)[:CHOICES] for _ in range(max(rows, 1))])
    return torch.randn(rows, HIDDEN), chosen[:rows], torch.rand(rows, CHOICES)


def check(one: Layer) -> None:
    for rows in (0, 1, 2, 7, 40):
        found, expected = one(*routed(rows)), one.by_torch(*routed(rows))
        bound = 1e-5 * max(1.0, float(expected.abs().max() if rows else 0))
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_kind_of_weights(kind: str) -> None:
    check(layer(kind))
    check(layer(kind, apart=True, biased=True))


@pytest.mark.parametrize("gate", GATES)
def test_of_every_gate(gate: str) -> None:
    check(layer(gate=gate, biased=True))


def test_each_expert_may_have_an_order_of_its_own() -> None:
    one = layer("4 bits", groups="scattered", apart=True)
    assert one.up.stacks[0].groups.shape == (EXPERTS, HIDDEN)
    check(one)


@pytest.mark.parametrize("kind", ["float32", "4 bits", "e2m1"])
def test_neither_company_nor_threads_change_a_row(kind: str) -> None:
    one, (x, chosen, shares) = layer(kind, biased=True), routed(40)
    together = one(x, chosen, shares)
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert torch.equal(one(x, chosen, shares), together)
            for rows in (1, 3, 7):
                parts = zip(x.split(rows), chosen.split(rows), shares.split(rows), strict=True)
                assert torch.equal(torch.cat([one(*part) for part in parts]), together)
    finally:
        torch.set_num_threads(1)


def test_experts_without_rows_are_not_read() -> None:
    one, (x, _, shares) = layer("float32"), routed(5)
    one.up.stacks[0].codes[: len(one.up.stacks[0].codes) // EXPERTS] = torch.nan
    chosen = torch.tensor([[1, 2, 5]]).repeat(5, 1)
    assert one(x, chosen, shares).isfinite().all()
    assert one(x, chosen - 1, shares).isnan().all()


def test_weights_of_several_kinds_are_no_stack() -> None:
    packs = [
        pack_weights([torch.ones(HIDDEN, WIDTH) * number], vectors().panel) for number in (1, 0.1)
    ]
    assert stacked(packs) is None


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    one = layer("4 bits", biased=True)
    x, chosen, shares = routed(4)
    assert one.up.bias is not None
    for wrong in (
        (x[:, :9], chosen, shares), (x[:2], chosen, shares), (x, chosen, shares[:, :2]),
        (x, chosen.int(), shares),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            one(*wrong)
    for up in (
        one.up._replace(bias=one.up.bias[:, :-1]), one.up._replace(widths=(WIDTH + 1,)),
        one.up._replace(stacks=(one.up.stacks[0]._replace(groups=torch.zeros(2, HIDDEN).int()),)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            one._replace(up=up)(x, chosen, shares)
