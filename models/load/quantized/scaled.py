"""Weights kept as bytes in their own places: FP8, and 8-bit integers that are not packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import WEIGHT, PartNames
from .quantized_weight import QuantizedWeight, groups_in_order, per_output

ZERO_POINT = "weight_zero_point"
GROUPS = "weight_g_idx"


@dataclass(frozen=True, slots=True)
class ScaledLayout:
    """`weight` [outputs, inputs] of FP8 or int8, beside its scales.

    compressed-tensors (`float-quantized`, `int-quantized`, `naive-quantized`) names the scales
    `weight_scale`, Fp8 checkpoints as of DeepSeek-V3 `weight_scale_inv`; both multiply. They are
    one for all, [outputs, 1], [outputs, groups], or one for each block of outputs and inputs.
    Integers may have zero points of the scales' shape, and the group of each input (act order).

    blocks  block sizes from the config
    """

    scale: str
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def names(self) -> PartNames:
        """Of its tensors."""
        own = frozenset({self.scale})
        return PartNames(own, own | {WEIGHT}, frozenset({ZERO_POINT, GROUPS}))

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight of a module's tensors. Raises `ValueError`."""
        codes, scales = parts[WEIGHT], parts[self.scale]
        if not is_one_byte(codes):
            raise ValueError(f"{WEIGHT} is {codes.dtype} beside {self.scale}, not FP8 or int8")
        if codes.ndim != 2:
            raise ValueError(f"{WEIGHT} has {codes.ndim} dimensions, not 2")
        block = self._block_of(codes, scales)
        spread = per_output(scales, codes.shape, block)
        zeros = parts.get(ZERO_POINT)
        return QuantizedWeight(
            codes=codes,
            scales=spread,
            zeros=None if zeros is None else per_output(zeros.float(), codes.shape, block),
            group_of=group_of_inputs(codes, spread, parts.get(GROUPS), block),
        )

    def _block_of(self, codes: Tensor, scales: Tensor) -> tuple[int, int] | None:
        for rows, columns in self.blocks:
            if scales.shape == (-(-codes.shape[0] // rows), -(-codes.shape[1] // columns)):
                return rows, columns
        return None


def is_one_byte(tensor: Tensor) -> bool:
    """Whether it holds FP8 or int8, which need scales."""
    return tensor.dtype == torch.int8 or (tensor.is_floating_point() and tensor.itemsize == 1)


def group_of_inputs(
    codes: Tensor, scales: Tensor, g_idx: Tensor | None, block: tuple[int, int] | None = None
) -> Tensor:
    """int64 [inputs] for codes [outputs, inputs] and scales [outputs, groups].

    Groups are in order, except with `g_idx`, where -1 also means in order. Raises `ValueError`
    where groups in order are not of one size.
    """
    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    if g_idx is not None and not (g_idx < 0).any():
        return g_idx.long()
    if block is not None:
        return groups_in_order(num_inputs, block[1], codes)
    if num_inputs % num_groups:
        raise ValueError(f"{num_inputs} inputs in {num_groups} groups")
    return groups_in_order(num_inputs, num_inputs // num_groups, codes)
