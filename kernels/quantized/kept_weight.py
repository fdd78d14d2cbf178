"""Quantised weights as they lie in memory for the kernels of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..small_codes import (
    E2M1_NUMBERS,
    E2M1_SHIFT,
    E4M3_SHIFT,
    LARGEST_E2M1_SCALE,
    LARGEST_E4M3_SCALE,
    LARGEST_UINT4,
    e2m1_codes,
    of_powers,
    powers_of_two,
)

# Integers of 8 and 4 bits, and floats of as many.
UINT8, UINT4, E4M3, E2M1 = "uint8", "uint4", "e4m3", "e2m1"
SIGN_BIT = 128
# The kernels read a tile of a line at once, at a single scale: at least what tensor cores take, at
# most what fits registers.
LEAST_TILE = 16
MOST_TILE = {UINT8: 128, E4M3: 128, UINT4: 64, E2M1: 64}
IN_HALVES, FLOATS = (UINT4, E2M1), (E4M3, E2M1)
# Values that are computed in float32 at once: 16 MiB, however large the matrix.
CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class KeptWeight:
    """The weight of a linear layer: (code - zero point) * scale, or code * scale + minimum.

    kind        of the codes: `UINT8`, `UINT4`, `E4M3` or `E2M1`
    codes       uint8 [outputs, bytes], padded to whole tiles. Of 4 bits, a byte has two inputs that
                are a tile apart: low ones are of the first tile, high ones of the second, and so on
    scales      float32 [groups, outputs], of e4m3 and e2m1 times `E4M3_SHIFT` and `E2M1_SHIFT`;
                uint8 if all are powers of two, their exponents as of e8m0
    offsets     float32 [groups, outputs], the zero points, or the minima; None: `zero` for all
    zero        zero point of all codes
    num_inputs  of the layer
    tile        codes that lie side by side and are of one group; a power of two
    group_size  inputs of a group; 0: all are one group
    are_minima  what `offsets` are
    order       int64 [inputs], which input each code is of; None: they lie in order. By groups, as
                quantisers with an act order do not have them
    """

    kind: str
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    zero: int
    num_inputs: int
    tile: int
    group_size: int
    are_minima: bool = False
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]"""
        return torch.Size((len(self.codes), self.num_inputs))

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.kind in IN_HALVES else 8

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and offsets, which a product of few rows reads."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.codes.nbytes + self.scales.nbytes + offsets

    def of_rows(self, rows: Tensor) -> KeptWeight:
        """These outputs alone, int64 [n], in their order."""
        offsets = None if self.offsets is None else self.offsets[:, rows]
        return replace(
            self, codes=self.codes[rows], scales=self.scales[:, rows].contiguous(),
            offsets=None if offsets is None else offsets.contiguous(),
        )  # fmt: skip

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values [outputs, inputs], computed in float32 and rounded to `dtype` once."""
        values = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        step = max(1, CHUNK_VALUES // self.num_inputs)
        for first in range(0, len(self.codes), step):
            chunk = slice(first, first + step)
            found = self._values(chunk)[:, : self.num_inputs].to(dtype)
            if self.order is None:
                values[chunk] = found
            else:
                values[chunk, self.order] = found
        return values

    def _values(self, lines: slice) -> Tensor:
        """float32 [lines, codes of a line], as they lie."""
        codes = self.codes[lines]
        if self.kind in IN_HALVES:
            tiles = codes.unflatten(1, (-1, 1, self.tile))
            codes = torch.cat([tiles & LARGEST_UINT4, tiles >> 4], dim=2).flatten(1)
        scales = self._of_inputs(wide_scales(self.scales[:, lines]), codes.shape[1])
        if self.kind == E2M1:
            # As floats of their bits, many were subnormal, and slow on CPUs.
            return E2M1_NUMBERS.to(codes.device)[codes.int()] * (scales / E2M1_SHIFT)
        if self.kind == E4M3:
            bits = codes.int()
            wide = (bits & SIGN_BIT) << 24 | (bits & ~SIGN_BIT) << 20
            return wide.view(torch.float32) * scales
        if self.offsets is None:
            return (codes.float() - self.zero) * scales
        offsets = self._of_inputs(self.offsets[:, lines], codes.shape[1])
        if self.are_minima:
            return codes.float() * scales + offsets
        return (codes.float() - offsets) * scales

    def _of_inputs(self, by_group: Tensor, width: int) -> Tensor:
        """[groups, lines] as [lines, width]."""
        return by_group.t().repeat_interleave(self.group_size or width, dim=1)[:, :width]


def keep_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor,
    minima: Tensor | None = None,
) -> KeptWeight | None:  # fmt: skip
    """A quantised weight for the kernels, whose values have the bits of (code - zero) * scale or
    code * scale + minimum in float32.

    codes     int8, uint8 or FP8 [outputs, inputs]
    scales    float32 [outputs, groups], and zeros and minima too; None: 0
    group_of  integers [inputs], the group of each input

    None if the kernels do not know such a weight: FP8 other than e4m3, or with zero points, minima
    or large scales; zero points that are not integers, or beside minima; groups that are no
    multiple of `LEAST_TILE`, or of several sizes.
    """
    num_inputs, num_groups, zero, order = codes.shape[1], scales.shape[1], 0, None
    if zeros is not None and (minima is not None or not (zeros == zeros.round()).all()):
        return None
    if codes.dtype == torch.float8_e4m3fn:
        if zeros is not None or minima is not None or scales.abs().max() > LARGEST_E4M3_SCALE:
            return None
        small = e2m1_codes(codes) if scales.abs().max() <= LARGEST_E2M1_SCALE else None
        if small is not None:
            kind, codes, scales = E2M1, small, scales * E2M1_SHIFT
        else:
            kind, codes, scales = E4M3, codes.view(torch.uint8), scales * E4M3_SHIFT
    elif codes.dtype == torch.int8:
        # Codes and zero points are both 128 more.
        kind, codes, zero = UINT8, codes.view(torch.uint8) ^ SIGN_BIT, SIGN_BIT
    elif codes.dtype == torch.uint8:
        kind = UINT4 if codes.max() <= LARGEST_UINT4 else UINT8
    else:
        return None
    group_size = _size_of_groups(group_of, num_groups)
    if group_size is None or (minima is not None and zero):
        return None
    if (group_of.diff() < 0).any():
        order = torch.argsort(group_of, stable=True)
        codes = codes[:, order]
    offsets = minima
    if zeros is not None:
        offsets = zeros + zero
        if (offsets == offsets[0, 0]).all():
            zero, offsets = int(offsets[0, 0]), None
    num_halves = 2 if kind in IN_HALVES else 1
    tile = MOST_TILE[kind]
    while tile > LEAST_TILE and (group_size or num_inputs // num_halves) % tile:
        tile //= 2
    codes = pad(codes, (0, -num_inputs % (num_halves * tile)))
    powers = powers_of_two(scales)
    scales = scales if powers is None else powers
    # Of the padding, whose values are 0.
    more_groups = 0 if not group_size else -(-codes.shape[1] // group_size) - num_groups
    if kind in IN_HALVES:
        low, high = codes.unflatten(1, (-1, 2, tile)).unbind(2)
        codes = (low | high << 4).flatten(1)
    return KeptWeight(
        kind, codes.contiguous(), _by_group(scales, more_groups),
        None if offsets is None else _by_group(offsets, more_groups), zero, num_inputs, tile,
        group_size, minima is not None, order,
    )  # fmt: skip


def _size_of_groups(group_of: Tensor, num_groups: int) -> int | None:
    """Inputs of a group, 0 for one group; None: the kernels do not know such groups."""
    if num_groups == 1:
        return 0
    counts = torch.bincount(group_of, minlength=num_groups)
    size = int(counts[0])
    # The last one may be cut off.
    is_even = bool((counts[:-1] == size).all() and 0 < counts[-1] <= size)
    return size if is_even and size % LEAST_TILE == 0 else None


def _by_group(per_output: Tensor, more: int) -> Tensor:
    """[outputs, groups] -> [groups + more, outputs]"""
    return pad(per_output, (0, more)).t().contiguous()


def wide_scales(scales: Tensor) -> Tensor:
    """Those of a weight in float32."""
    return of_powers(scales) if scales.dtype == torch.uint8 else scales


def are_alike(one: KeptWeight, other: KeptWeight) -> bool:
    """Whether their codes and groups are of one kind, so that they can be `joined`."""
    return (
        (one.kind, one.num_inputs, one.tile, one.group_size, one.are_minima)
        == (other.kind, other.num_inputs, other.tile, other.group_size, other.are_minima)
        and (one.order is None) == (other.order is None)
        and (one.order is None or other.order is None or torch.equal(one.order, other.order))
    )


def joined(weights: Sequence[KeptWeight]) -> KeptWeight:
    """One weight with the outputs of all, which are alike."""
    first = weights[0]
    zero, offsets = first.zero, None
    if any(one.offsets is not None or one.zero != zero for one in weights):
        zero = 0
        all_offsets = [
            torch.full_like(wide_scales(one.scales), one.zero)
            if one.offsets is None
            else one.offsets
            for one in weights
        ]
        offsets = torch.cat(all_offsets, dim=1)
    all_scales = [one.scales for one in weights]
    if len({scales.dtype for scales in all_scales}) > 1:
        all_scales = [wide_scales(scales) for scales in all_scales]
    return replace(
        first, codes=torch.cat([one.codes for one in weights]),
        scales=torch.cat(all_scales, dim=1), offsets=offsets, zero=zero,
    )  # fmt: skip
