"""GPTQ's layout, as AutoGPTQ and GPTQModel write it (`checkpoint_format` gptq and gptq_v2).

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers
(2022); the layout is of the packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .layout import PartNames
from .quantized_weight import WORD_BITS, QuantizedWeight, groups_in_order, unpacked

# Whose fields do not cross words. Tools disagree on the zero points of 3 bits.
BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """Packed along the inputs, in their order; with act order (`g_idx`) groups lie scattered.

    qweight  int32 [inputs * bits / 32, outputs]
    qzeros   int32 [groups, outputs * bits / 32]; the first version keeps zero points less 1
    scales   [groups, outputs]
    g_idx    int [inputs], the group of each input; absent: `group_size` inputs each
    """

    bits: int
    group_size: int  # -1: all inputs are one group
    is_v2: bool
    # GPTQModel's `dynamic` gives some modules other bits than the config's.
    is_mixed: bool = False

    @property
    def names(self) -> PartNames:
        """Of its tensors."""
        required = frozenset({"qweight", "qzeros", "scales"})
        return PartNames(required | {"g_idx"}, required, frozenset({"g_idx"}))

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight of a module's tensors. Raises `ValueError`."""
        packed, g_idx = parts["qweight"], parts.get("g_idx")
        bits = self._bits_of(packed, g_idx)
        num_inputs = packed.shape[0] * WORD_BITS // bits
        scales = parts["scales"].float()
        num_outputs = packed.shape[1]
        return QuantizedWeight(
            codes=unpacked(packed.T.contiguous(), bits, num_inputs),
            scales=scales.T,
            zeros=unpacked(self._zeros(parts["qzeros"], bits), bits, num_outputs).float().T,
            group_of=self._groups(g_idx, num_inputs, scales),
        )

    def _bits_of(self, packed: Tensor, g_idx: Tensor | None) -> int:
        if not self.is_mixed or g_idx is None:
            return self.bits
        bits = packed.shape[0] * WORD_BITS // max(1, g_idx.numel())
        if bits not in BITS:
            raise ValueError(f"{bits} bits are not read, only {', '.join(map(str, BITS))}")
        return bits

    def _zeros(self, qzeros: Tensor, bits: int) -> Tensor:
        if self.is_v2:
            return qzeros
        # One is taken from whole words, so that a zero point of 0 borrows from its neighbour:
        # adding to whole words gives that back.
        return qzeros + sum(1 << shift for shift in range(0, WORD_BITS, bits))

    def _groups(self, g_idx: Tensor | None, num_inputs: int, scales: Tensor) -> Tensor:
        # Without act order some tools write zeros, which are meaningless with several groups.
        if g_idx is None or (len(scales) > 1 and not g_idx.any()):
            size = num_inputs if self.group_size == -1 else self.group_size
            return groups_in_order(num_inputs, size, scales)
        return g_idx.long()
