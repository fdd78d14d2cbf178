"""A quantised matrix in the one form that every layout is unpacked to, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Values that are computed in float32 at once: 16 MiB, however large the matrix.
CHUNK_VALUES = 1 << 22
WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight of a linear layer: value = (code - zero) * scale, with a scale for each group.

    codes     [outputs, inputs], a byte each: int8, uint8 or a format of FP8
    scales    float32 [outputs, groups]
    zeros     float32 [outputs, groups]; None: 0
    group_of  int64 [inputs], the group of each input

    Raises `ValueError` where the shapes do not belong together.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        num_groups = self.scales.shape[-1]
        if self.scales.shape != (outputs, num_groups):
            raise ValueError(f"scales {tuple(self.scales.shape)} for {outputs} outputs")
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(
                f"zero points {tuple(self.zeros.shape)} beside scales {tuple(self.scales.shape)}"
            )
        if self.group_of.shape != (inputs,):
            raise ValueError(f"groups of {self.group_of.numel()} inputs, the weight has {inputs}")
        if not 0 <= int(self.group_of.min()) <= int(self.group_of.max()) < num_groups:
            raise ValueError(f"an input's group is none of the {num_groups} that have scales")

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values [outputs, inputs], computed in float32 and rounded to `dtype` once."""
        outputs, inputs = self.codes.shape
        values = torch.empty(outputs, inputs, dtype=dtype, device=self.codes.device)
        step = max(1, CHUNK_VALUES // inputs)
        shape = self._shape_by_group()
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            chunk = self.codes[rows].to(torch.float32, memory_format=torch.contiguous_format)
            chunk = chunk.view(-1, *shape)
            if self.zeros is not None:
                chunk -= self._of_inputs(self.zeros[rows], shape)
            chunk *= self._of_inputs(self.scales[rows], shape)
            values[rows] = chunk.view(-1, inputs)
        return values

    def _shape_by_group(self) -> tuple[int, ...]:
        """(groups, inputs of each) where groups lie in order, which is quicker; else (inputs,)."""
        num_inputs, num_groups = self.codes.shape[1], self.scales.shape[1]
        if num_inputs % num_groups:
            return (num_inputs,)
        size = num_inputs // num_groups
        in_order = torch.equal(self.group_of, groups_in_order(num_inputs, size, self.codes))
        return (num_groups, size) if in_order else (num_inputs,)

    def _of_inputs(self, by_group: Tensor, shape: tuple[int, ...]) -> Tensor:
        """[outputs, groups] so that it broadcasts over [outputs, *shape]."""
        return by_group[:, self.group_of] if len(shape) == 1 else by_group[..., None]


def unpacked(packed: Tensor, bits: int, count: int, order: Sequence[int] | None = None) -> Tensor:
    """uint8 [..., count]: the fields of `bits` bits in int32 words [..., words], lowest first.

    `bits` divides 32. `order`: which of its word's values each field is; None: they lie in order.
    Raises `ValueError` where the words are not int32, or are too few.
    """
    if packed.dtype != torch.int32:
        raise ValueError(f"packed words are {packed.dtype}, not torch.int32")
    fields = WORD_BITS // bits
    if packed.shape[-1] * fields < count:
        raise ValueError(f"{packed.shape[-1]} words of {fields} values for {count} values")
    values = torch.empty(*packed.shape, fields, dtype=torch.uint8, device=packed.device)
    for field in range(fields):
        # The shift copies the sign, of which the mask leaves nothing.
        place = field if order is None else order[field]
        values[..., place] = (packed >> (bits * field)) & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count]


def groups_in_order(num_inputs: int, group_size: int, like: Tensor) -> Tensor:
    """int64 [num_inputs]: `group_size` inputs each, on the device of `like`."""
    return torch.arange(num_inputs, device=like.device) // group_size


def per_output(scales: Tensor, shape: torch.Size, block: tuple[int, int] | None = None) -> Tensor:
    """Scales as float32 [outputs, groups], of a weight of `shape` [outputs, inputs].

    `scales`: one for all, [outputs, 1], [outputs, groups], or with `block` one for each block of
    so many outputs and inputs. Raises `ValueError` for another shape, or for no floating point.
    """
    if not scales.is_floating_point():
        raise ValueError(f"scales are {scales.dtype}, not floating point")
    outputs, inputs = shape
    wide = scales.to(torch.float32)
    if wide.numel() == 1:
        return wide.reshape(1, 1).expand(outputs, 1)
    if block is not None and wide.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        return wide.repeat_interleave(block[0], dim=0)[:outputs]
    if wide.ndim != 2 or wide.shape[0] != outputs:
        blocks = "" if block is None else f" in blocks of {block[0]} x {block[1]}"
        raise ValueError(f"scales {tuple(wide.shape)} for a weight {tuple(shape)}{blocks}")
    return wide
