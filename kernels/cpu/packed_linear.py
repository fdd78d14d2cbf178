"""A linear layer whose weight lies in panels of columns (`kernels/cpu/source/linear.cpp`).

A library's product of two to eight rows takes twice the time of one row; this one takes hardly more
than one row. A row's result is bitwise independent of the other rows and of the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..small_codes import (
    E4M3_SHIFT,
    LARGEST_E4M3_SCALE,
    LARGEST_UINT4,
    e2m1_codes,
    powers_of_two,
)
from .build import Vectors
from .large_pages import LargePages

NOTHING = torch.empty(0)
# Inputs of a chunk of `kernels/cpu/source/byte_dots.h`, and of a lane of its dot products.
CHUNK, DEEP = 32, 4
# The codes that stand for 0 in it.
ZERO_OF_4_BITS, ZERO_OF_8_BITS = 8, 128
_PAGES = LargePages()


class PackedWeight(NamedTuple):
    """The tensors of a weight in panels of columns, as the operators take it.

    codes   [panels, inputs, panel]  the numbers: float32 or bfloat16. Of a quantised weight int8,
            e4m3 or uint8, of which value = (code - zero) * scale. uint8 and e2m1 [panels, inputs,
            panel / 2] have 4 bits a column: the low ones are of the panel's first half, the high
            ones of its second
    scales  float32 [panels, groups, panel]  of a quantised weight, of e4m3 times `E4M3_SHIFT`;
            e8m0 if all are powers of two
    zeros   uint8 [panels, groups, panel]  of uint8
    groups  int32 [inputs]  the group of each input
    minima  float32 [panels, groups, panel]  in place of zeros: value = code * scale + minimum; of
            int8 and of codes of 4 bits, whose products with their scales are exact

    For dot products of bytes (`kernels/cpu/source/byte_dots.h`), with panels of two vectors:

    codes   uint8 or e2m1 [panels, chunks, dots, bytes]  four inputs of each column of a panel. Of 4
            bits, low ones are of the first vector of columns, high ones of the second
    scales  e8m0 as above; float16 if it has all of them and all minima; else float32. Minima
            likewise
    zeros   none where all are 128, or 8 of 4 bits; nor beside minima of int8, whose codes are
            128 more here
    groups  int32 [chunks]
    """

    codes: Tensor
    scales: Tensor = NOTHING
    zeros: Tensor = NOTHING
    groups: Tensor = NOTHING
    minima: Tensor = NOTHING

    @property
    def kind(self) -> str:
        """Of the numbers, for display."""
        columns = self.scales.shape[-1]
        whole = columns if self.codes.dim() == 3 else columns * CHUNK
        if self.codes.dtype == torch.uint8 and self.codes[0, 0].numel() * 2 == whole:
            return "uint4"
        if self.codes.dtype == torch.uint8:
            return "int8"
        return str(self.codes.dtype).removeprefix("torch.")


def pack_weights(weights: Sequence[Tensor], panel: int) -> PackedWeight:
    """Weights [inputs, outputs] side by side -> [panels, inputs, panel]. The last panel is padded
    with zeros.

    In bfloat16 if that has all their values, as of a checkpoint in bfloat16; else float32.
    """
    inputs = weights[0].shape[0]
    outputs = sum(weight.shape[1] for weight in weights)
    packed = weights[0].new_zeros(-(-outputs // panel), inputs, panel)
    first = 0
    for weight in weights:
        last = first + weight.shape[1]
        for index in range(first // panel, -(-last // panel)):
            begin, end = max(first, index * panel), min(last, (index + 1) * panel)
            columns = slice(begin - index * panel, end - index * panel)
            packed[index, :, columns] = weight[:, begin - first : end - first]
        first = last
    half = packed.bfloat16()
    return PackedWeight(half if torch.equal(half.float(), packed) else packed)


def pack_quantized(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor, wanted: Vectors,
    minima: Tensor | None = None, *, narrow: bool = True,
) -> PackedWeight | None:  # fmt: skip
    """A quantised weight, (code - zero) * scale or code * scale + minimum: for dot products of
    bytes where these know it, else so that products have the bits of its float32 values.

    codes     int8, uint8 or FP8 [outputs, inputs]
    scales    float32 [outputs, groups], and zeros and minima too; None: 0
    group_of  integers [inputs], the group of each input
    narrow    codes of 8 bits are kept in 4 where these have them all

    None if the kernels do not know these numbers: FP8 other than e4m3 or with zero points or large
    scales, zero points that are not integers in the codes' range, minima of other than int8 and of
    codes of 4 bits, and where these are widened, beside scales whose products with codes are not
    exact in float32.
    """
    if wanted.has_byte_dots and _are_chunks(group_of):
        if codes.dtype in (torch.int8, torch.uint8):
            return _pack_for_dots(
                codes, scales, zeros, group_of, wanted.lanes, minima, narrow=narrow
            )
        is_float = codes.dtype == torch.float8_e4m3fn and zeros is None and minima is None
        small = e2m1_codes(codes) if narrow and is_float else None
        if small is not None:
            numbers = _for_dots(small, wanted.lanes, in_halves=True).view(torch.float4_e2m1fn_x2)
            [kept] = _in_panels([scales], 2 * wanted.lanes)
            return PackedWeight(numbers, kept, groups=group_of[::CHUNK].int())
    return _pack_for_widening(codes, scales, zeros, group_of, wanted.panel, minima, narrow=narrow)


def _pack_for_widening(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor, panel: int,
    minima: Tensor | None, *, narrow: bool,
) -> PackedWeight | None:  # fmt: skip
    if minima is not None:
        is_small = narrow and codes.dtype == torch.uint8 and codes.max() <= LARGEST_UINT4
        is_known = zeros is None and (is_small or codes.dtype == torch.int8)
        if not (is_known and _has_exact_products(scales, 4 if is_small else 7)):
            return None
        packed = _panels(codes, panel)
        return PackedWeight(
            _in_halves(packed) if is_small else packed, _panels(scales, panel),
            groups=group_of.int(), minima=_panels(minima, panel),
        )  # fmt: skip
    if codes.dtype == torch.float8_e4m3fn:
        found = _float_panels(codes, scales, panel, narrow=narrow) if zeros is None else None
        if found is None:
            return None
        packed, scales = found
    elif codes.dtype == torch.int8 and zeros is None:
        packed = _panels(codes, panel)
    elif codes.dtype in (torch.int8, torch.uint8):
        zeros = torch.zeros_like(scales) if zeros is None else zeros
        if codes.dtype == torch.int8:
            # Both 128 more, which is exact, and so is their difference.
            codes, zeros = codes.view(torch.uint8) ^ ZERO_OF_8_BITS, zeros + ZERO_OF_8_BITS
        if not torch.equal(zeros.byte().float(), zeros):
            return None
        packed = _panels(codes, panel)
        if narrow and codes.max() <= LARGEST_UINT4:
            packed = _in_halves(packed)
    else:
        return None
    packed_zeros = NOTHING
    if packed.dtype == torch.uint8:
        assert zeros is not None
        packed_zeros = _panels(zeros.byte(), panel)
    return PackedWeight(packed, _scale_panels(scales, panel), packed_zeros, group_of.int())


def _float_panels(
    codes: Tensor, scales: Tensor, panel: int, *, narrow: bool
) -> tuple[Tensor, Tensor] | None:
    """Of e4m3: codes in panels, of e2m1 where that has them all, and the scales beside them."""
    small = e2m1_codes(codes) if narrow else None
    if small is not None:
        return _in_halves(_panels(small, panel)).view(torch.float4_e2m1fn_x2), scales
    if scales.abs().max() > LARGEST_E4M3_SCALE:
        return None
    return _panels(codes.view(torch.uint8), panel).view(codes.dtype), scales * E4M3_SHIFT


def _are_chunks(group_of: Tensor) -> bool:
    """Whether the inputs of each chunk are of one group."""
    return all(bool((chunk == chunk[0]).all()) for chunk in group_of.split(CHUNK))


def _pack_for_dots(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor, lanes: int,
    minima: Tensor | None, *, narrow: bool,
) -> PackedWeight | None:  # fmt: skip
    is_small = narrow and codes.dtype == torch.uint8 and bool(codes.max() <= LARGEST_UINT4)
    if minima is not None and (zeros is not None or not (is_small or codes.dtype == torch.int8)):
        return None
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8) ^ ZERO_OF_8_BITS
        zeros = None if zeros is None else zeros + ZERO_OF_8_BITS
    elif minima is None:
        zeros = torch.zeros_like(scales) if zeros is None else zeros
    if zeros is not None and not torch.equal(zeros.byte().float(), zeros):
        return None
    if zeros is not None and (zeros == (ZERO_OF_4_BITS if is_small else ZERO_OF_8_BITS)).all():
        zeros = None
    columns = 2 * lanes
    packed = _in_panels([scales] if minima is None else [scales, minima], columns)
    return PackedWeight(
        _for_dots(codes, lanes, in_halves=is_small), packed[0],
        NOTHING if zeros is None else _panels(zeros.byte(), columns), group_of[::CHUNK].int(),
        NOTHING if minima is None else packed[1],
    )  # fmt: skip


def _scale_panels(scales: Tensor, columns: int) -> Tensor:
    """In e8m0 or float32."""
    powers = powers_of_two(scales)
    if powers is None:
        return _panels(scales, columns)
    return _panels(powers, columns).view(torch.float8_e8m0fnu)


def _in_panels(numbers: Sequence[Tensor], columns: int) -> list[Tensor]:
    """Scales, and minima if there are any, in the smallest type that has all of them."""
    if len(numbers) == 1:
        scales = _scale_panels(numbers[0], columns)
        if scales.dtype == torch.float8_e8m0fnu:
            return [scales]
    half = [one.half() for one in numbers]
    if all(torch.equal(small.float(), one) for small, one in zip(half, numbers, strict=True)):
        numbers = half
    return [_panels(one, columns) for one in numbers]


def _for_dots(codes: Tensor, lanes: int, *, in_halves: bool) -> Tensor:
    """uint8 [outputs, inputs] -> [panels, chunks, dots, bytes], padded with zeros."""
    outputs, inputs = codes.shape
    padded = pad(codes, (0, -inputs % CHUNK, 0, -outputs % (2 * lanes)))
    blocks = padded.view(-1, 2, lanes, padded.shape[1] // CHUNK, CHUNK // DEEP, DEEP)
    first, second = blocks.permute(1, 0, 3, 4, 2, 5).flatten(-2)
    packed = first | second << 4 if in_halves else torch.cat([first, second], dim=-1)
    return packed.contiguous()


def _has_exact_products(scales: Tensor, bits: int) -> bool:
    """Whether float32 has all products of these scales with integers below 2^bits."""
    return not bool((scales.view(torch.int32) & ((1 << bits) - 1)).any())


def _in_halves(codes: Tensor) -> Tensor:
    """Codes of 4 bits [..., panel] -> [..., panel / 2]."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _panels(rows: Tensor, panel: int) -> Tensor:
    """[outputs, n] -> [panels, n, panel], the last one padded with zeros."""
    padded = pad(rows, (0, 0, 0, -len(rows) % panel))
    return padded.view(-1, panel, rows.shape[1]).transpose(1, 2).contiguous()


def placed(weight: PackedWeight) -> PackedWeight:
    """A copy in large pages, for a weight that stays."""
    return PackedWeight(*map(_PAGES.copy, weight))


def packed_linear(
    x: Tensor, weight: PackedWeight, outputs: int, bias: Tensor | None = None, *,
    is_rough: bool = False,
) -> Tensor:  # fmt: skip
    """`x` [..., inputs] times a packed weight, plus a bias -> [..., outputs], float32.

    is_rough  for drafts: dot products of bytes take `x` rounded to 8 bits, where they else have all
              its bits in three

    Needs `kernels.cpu.build.load_cpu_ops` first.
    """
    return torch.ops.draftline.packed_linear(x, weight, outputs, bias, is_rough)
