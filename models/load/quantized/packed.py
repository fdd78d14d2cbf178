"""compressed-tensors' packed integers (`pack-quantized`), of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import PartNames
from .quantized_weight import WORD_BITS, QuantizedWeight, per_output, unpacked
from .scaled import GROUPS, ZERO_POINT, group_of_inputs

BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Packed along the inputs; signed integers are kept plus half their range.

    weight_packed      int32 [outputs, inputs * bits / 32], rounded up
    weight_shape       outputs and inputs
    weight_scale       one for all, [outputs, 1] or [outputs, groups]
    weight_zero_point  of asymmetric ones: int32 packed along the outputs, or int8 as it is
    weight_g_idx       int [inputs], the group of each input (act order)
    """

    bits: tuple[int, ...]  # that the config's groups of modules have

    @property
    def names(self) -> PartNames:
        """Of its tensors."""
        own = frozenset({"weight_packed", "weight_shape"})
        return PartNames(own, own | {"weight_scale"}, frozenset({ZERO_POINT, GROUPS}))

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight of a module's tensors. Raises `ValueError`."""
        outputs, inputs = (int(size) for size in parts["weight_shape"].tolist())
        shape = torch.Size((outputs, inputs))
        packed = parts["weight_packed"]
        bits = self._bits_of(packed, shape)
        codes = unpacked(packed, bits, inputs)
        scales = per_output(parts["weight_scale"], shape)
        zeros = _zeros(parts.get(ZERO_POINT), bits, shape, scales)
        groups = group_of_inputs(codes, scales, parts.get(GROUPS))
        return QuantizedWeight(codes, scales, zeros, groups)

    def _bits_of(self, packed: Tensor, shape: torch.Size) -> int:
        for bits in self.bits:
            if packed.shape == (shape[0], -(-shape[1] * bits // WORD_BITS)):
                return bits
        raise ValueError(
            f"weight_packed {tuple(packed.shape)} is not a weight {tuple(shape)} of "
            f"{' or '.join(map(str, self.bits))} bits"
        )


def _zeros(zeros: Tensor | None, bits: int, shape: torch.Size, scales: Tensor) -> Tensor:
    """float32 [outputs, groups] of what is subtracted from the packed codes."""
    half = 1 << (bits - 1)
    if zeros is None:
        return torch.full_like(scales, half)
    if zeros.dtype != torch.int32:
        return per_output(zeros.float(), shape).expand_as(scales) + half
    # These are packed with half the range, as the codes are: the halves cancel.
    return unpacked(zeros.T.contiguous(), bits, shape[0]).T.float()
