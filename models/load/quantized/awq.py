"""AWQ's layout, as AutoAWQ writes it (`version` gemm).

Lin et al., AWQ: Activation-aware Weight Quantization (2023); the layout is of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .layout import PartNames
from .quantized_weight import QuantizedWeight, groups_in_order, unpacked

BITS = 4
# Output 8 w + ORDER[i] lies in field i of word w: the kernels unpack even and odd halves at once.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """Packed along the outputs, 8 a word in an order of its own.

    qweight  int32 [inputs, outputs / 8]
    qzeros   int32 [groups, outputs / 8]
    scales   [groups, outputs]
    """

    group_size: int  # -1: all inputs are one group

    @property
    def names(self) -> PartNames:
        """Of its tensors."""
        required = frozenset({"qweight", "qzeros", "scales"})
        return PartNames(required, required)

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight of a module's tensors. Raises `ValueError`."""
        num_inputs = parts["qweight"].shape[0]
        scales = parts["scales"].float()
        size = num_inputs if self.group_size == -1 else self.group_size
        return QuantizedWeight(
            codes=_unpacked(parts["qweight"]),
            scales=scales.T,
            zeros=_unpacked(parts["qzeros"]).float(),
            group_of=groups_in_order(num_inputs, size, scales),
        )


def _unpacked(packed: Tensor) -> Tensor:
    """uint8 [outputs, rows] of words [rows, outputs / 8]."""
    return unpacked(packed, BITS, packed.shape[1] * len(ORDER), ORDER).T.contiguous()
