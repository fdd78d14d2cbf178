"""Random quantised weights of every kind of codes."""

from __future__ import annotations

import torch
from draftline.kernels.small_codes import E2M1_NUMBERS
from draftline.models.load.quantized_layouts import QuantizedWeight, groups_in_order
from torch import Tensor


def codes_of(kind: str, outputs: int, inputs: int) -> Tensor:
    if kind == "e2m1":
        return E2M1_NUMBERS[torch.randint(16, (outputs, inputs))].to(torch.float8_e4m3fn)
    if kind == "e4m3":
        every = torch.arange(256, dtype=torch.uint8)
        finite = every[every.view(torch.float8_e4m3fn).float().isfinite()]
        chosen = torch.randint(len(finite), (outputs, inputs))
        return finite[chosen].view(torch.float8_e4m3fn)
    if kind.startswith("int8"):
        return torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    most = 16 if kind.startswith("4 bits") else 256
    return torch.randint(most, (outputs, inputs), dtype=torch.uint8)


def quantized(kind: str, groups: str, inputs: int, outputs: int) -> QuantizedWeight:
    codes = codes_of(kind, outputs, inputs)
    size = {"one": inputs, "scattered": 16}.get(groups) or int(groups)
    group_of = groups_in_order(inputs, size, codes)
    num_groups = int(group_of.max()) + 1
    if groups == "scattered":
        group_of = group_of[torch.randperm(inputs)]
    zeros = torch.randint(16, (outputs, num_groups)).float()
    scales = torch.randn(outputs, num_groups) / 100
    if kind.endswith("with minima"):
        minima = torch.randn(outputs, num_groups) / 10
        return QuantizedWeight(codes, scales.half().float(), None, group_of, minima)
    has_zeros = codes.dtype == torch.uint8 or kind.endswith("with zero points")
    return QuantizedWeight(codes, scales, zeros if has_zeros else None, group_of)
