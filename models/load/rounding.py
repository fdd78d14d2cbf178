"""Weights rounded to 8 or 4 bits as they load (`quantization`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .quantized_layouts import CHUNK_VALUES, QuantizedWeight, groups_in_order, side_by_side

# Inputs that share a scale.
GROUP_SIZE = 128
# The largest code of each kind.
LARGEST = {"int8": 127, "fp8": 448, "int4": 15}
TINY = torch.finfo(torch.float32).tiny


def rounded(weight: Tensor, kind: str) -> QuantizedWeight:
    """A weight [outputs, inputs] with a scale for each `GROUP_SIZE` inputs of an output, or for the
    fewer of the last group.

    kind  int8: 127 steps of either sign. fp8: e4m3, whose largest number is the group's largest.
          int4: 16 steps from the group's least to its largest number, 0 among them

    Raises `ValueError` for a weight that is not finite.
    """
    chunks = weight.split(max(1, CHUNK_VALUES // weight.shape[1]))
    whole = side_by_side([_rounded_rows(rows, kind) for rows in chunks])
    assert whole is not None
    return whole


def _rounded_rows(rows: Tensor, kind: str) -> QuantizedWeight:
    outputs, inputs = rows.shape
    groups = pad(rows.float(), (0, -inputs % GROUP_SIZE)).view(outputs, -1, GROUP_SIZE)
    least, most = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    if kind == "int4":
        scales = ((most - least) / LARGEST[kind]).clamp(min=TINY)
        zeros = (-least / scales).round()
        steps = (groups / scales[..., None]).round() + zeros[..., None]
        codes = steps.clamp(0, LARGEST[kind]).to(torch.uint8)
    else:
        scales = (torch.maximum(-least, most) / LARGEST[kind]).clamp(min=TINY)
        zeros = None
        steps = groups / scales[..., None]
        if kind == "int8":
            codes = steps.round().to(torch.int8)
        else:
            codes = steps.clamp(-LARGEST[kind], LARGEST[kind]).to(torch.float8_e4m3fn)
    codes = codes.view(outputs, -1)[:, :inputs].contiguous()
    return QuantizedWeight(codes, scales, zeros, groups_in_order(inputs, GROUP_SIZE, codes))
