"""How quantised checkpoints keep the weights of a linear layer, and their values in floating point.

Every layout is unpacked to one form, `QuantizedWeight`. GPTQ: Frantar et al. 2022; its layout is
that of AutoGPTQ and GPTQModel (`checkpoint_format` gptq and gptq_v2). AWQ: Lin et al. 2023; its
layout is AutoAWQ's (`version` gemm).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.small_codes import E2M1_AS_E4M3, LARGEST_UINT4

# Values that are computed in float32 at once: 16 MiB, however large the matrix.
CHUNK_VALUES = 1 << 22
WORD_BITS = 32
# Of either sign.
E4M3_NAN = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight of a linear layer: (code - zero) * scale + minimum, with a scale for each group.

    codes     [outputs, inputs], a byte each: int8, uint8 or a format of FP8
    scales    float32 [outputs, groups]
    zeros     float32 [outputs, groups]; None: 0
    group_of  int64 [inputs], the group of each input
    minima    float32 [outputs, groups], of GGUF's blocks; None: 0

    Raises `ValueError` where the shapes do not belong together, or numbers are not finite.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor
    minima: Tensor | None = None

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
        if self.minima is not None and self.minima.shape != self.scales.shape:
            raise ValueError(
                f"minima {tuple(self.minima.shape)} beside scales {tuple(self.scales.shape)}"
            )
        if not self.scales.isfinite().all():
            raise ValueError("a scale is not finite")
        is_e4m3 = self.codes.dtype == torch.float8_e4m3fn
        if is_e4m3 and (self.codes.view(torch.uint8) & E4M3_NAN == E4M3_NAN).any():
            raise ValueError("a code is not a number")

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]"""
        return self.codes.shape

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on a device."""
        if self.codes.device == device:
            return self
        zeros, minima = (
            None if one is None else one.to(device) for one in (self.zeros, self.minima)
        )
        return QuantizedWeight(
            self.codes.to(device), self.scales.to(device), zeros, self.group_of.to(device), minima
        )

    def of_rows(self, rows: Tensor) -> QuantizedWeight:
        """These outputs alone, int64 [n], in their order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        minima = None if self.minima is None else self.minima[rows]
        # Bytes, since torch does not index all formats of FP8.
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)
        return QuantizedWeight(codes, self.scales[rows], zeros, self.group_of, minima)

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
            if self.minima is not None:
                chunk += self._of_inputs(self.minima[rows], shape)
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


def side_by_side(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the outputs of all; None if their codes or groups differ in kind."""
    first = weights[0]
    if any(
        one.codes.dtype != first.codes.dtype
        or (one.zeros is None) != (first.zeros is None)
        or (one.minima is None) != (first.minima is None)
        or one.scales.shape[1] != first.scales.shape[1]
        or not torch.equal(one.group_of, first.group_of)
        for one in weights
    ):
        return None
    zeros = [one.zeros for one in weights if one.zeros is not None]
    minima = [one.minima for one in weights if one.minima is not None]
    codes = torch.cat([one.codes.view(torch.uint8) for one in weights])
    return QuantizedWeight(
        codes.view(first.codes.dtype),
        torch.cat([one.scales for one in weights]),
        torch.cat(zeros) if zeros else None,
        first.group_of,
        torch.cat(minima) if minima else None,
    )


# Beside float32 weights: the codes and scales that have the same values. The name does not end as
# those of weights, which other programs read.
KEPT_FILE = "kept_weights.bin"
KEPT_PARTS = ("codes", "scales", "zeros", "minima")


def stored_parts(
    name: str, weight: QuantizedWeight, experts: Sequence[int] = ()
) -> dict[str, Tensor]:
    """The tensors of `KEPT_FILE` for a weight, whose groups are in order.

    experts  [number] where it has the outputs of so many experts, one behind the other
    """
    parts = {part: getattr(weight, part) for part in KEPT_PARTS}
    return {
        f"{name}.{part}": tensor.contiguous().view(*experts, -1, tensor.shape[1])
        for part, tensor in parts.items()
        if tensor is not None
    }


def kept_weight(name: str, stored: Mapping[str, Tensor]) -> QuantizedWeight:
    """The weight of `stored_parts`. Raises `ValueError` if parts are missing or do not fit."""
    codes, scales, zeros, minima = (stored.get(f"{name}.{part}") for part in KEPT_PARTS)
    if codes is None or scales is None:
        raise ValueError("codes or scales are missing")
    return QuantizedWeight(codes, scales, zeros, group_of_inputs(codes, scales, None), minima)


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


WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class PartNames:
    """Last parts of the names of a module's tensors.

    own       one of them marks a module as stored so
    required  those that the weight cannot be computed without; `own` may be among them
    optional  further ones that may be present
    """

    own: frozenset[str]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()


class Layout(Protocol):
    """A way to store the weight of a linear layer (or of an embedding) in several tensors."""

    @property
    def names(self) -> PartNames:
        """Of its tensors."""
        ...

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight from a module's tensors, by the last part of their names.

        Raises `ValueError` if they do not fit each other or the config.
        """
        ...


class ExpertsLayout(Protocol):
    """A way to store the matrices of all experts of a layer in a few tensors."""

    @property
    def names(self) -> PartNames:
        """What the names of these have behind that of the matrices in transformers' model."""
        ...

    @property
    def is_turned(self) -> bool:
        """Whether transformers' model has matrices [inputs, outputs]."""
        ...

    def weights(self, parts: Mapping[str, Tensor]) -> Iterator[QuantizedWeight]:
        """The weight [outputs, inputs] of one expert after the other, by `names`.

        Raises `ValueError` if they do not fit each other or the config.
        """
        ...


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


PACKED_BITS = (4, 8)


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


# Whose fields do not cross words. Tools disagree on the zero points of 3 bits.
GPTQ_BITS = (2, 4, 8)


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
        if bits not in GPTQ_BITS:
            raise ValueError(f"{bits} bits are not read, only {', '.join(map(str, GPTQ_BITS))}")
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


AWQ_BITS = 4
# Output 8 w + AWQ_ORDER[i] lies in field i of word w: kernels unpack even and odd halves at once.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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
    return unpacked(packed, AWQ_BITS, packed.shape[1] * len(AWQ_ORDER), AWQ_ORDER).T.contiguous()


SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Fp8ExpertsLayout:
    """FP8 [experts, outputs, inputs] beside its scales, as transformers' `FP8Experts` has them.

    ""          the codes
    _scale_inv  [experts, blocks of outputs, blocks of inputs], or one for each expert

    blocks  block sizes from the config
    """

    blocks: tuple[tuple[int, int], ...]

    is_turned = False

    @property
    def names(self) -> PartNames:
        """Of its tensors; activations are not quantised."""
        own = frozenset({SCALE_INV})
        return PartNames(own, own | {""}, frozenset({"_activation_scale"}))

    def weights(self, parts: Mapping[str, Tensor]) -> Iterator[QuantizedWeight]:
        """See `ExpertsLayout`. Raises `ValueError`."""
        one = ScaledLayout(SCALE_INV, self.blocks)
        for codes, scales in zip(parts[""], parts[SCALE_INV], strict=True):
            yield one.weight({WEIGHT: codes, SCALE_INV: scales})


@dataclass(frozen=True, slots=True)
class Mxfp4ExpertsLayout:
    """MXFP4, as of gpt-oss.

    _blocks  uint8 [experts, outputs, groups, 16]  two codes of e2m1 a byte, the low one first
    _scales  uint8 [experts, outputs, groups]      powers of two, as e8m0
    """

    is_turned = True

    @property
    def names(self) -> PartNames:
        """Of its tensors."""
        return PartNames(frozenset({BLOCKS}), frozenset({BLOCKS, SCALES}))

    def weights(self, parts: Mapping[str, Tensor]) -> Iterator[QuantizedWeight]:
        """See `ExpertsLayout`; the codes are of e4m3, which has all numbers of e2m1. Raises
        `ValueError`."""
        blocks, scales = parts[BLOCKS], parts[SCALES]
        fits = blocks.ndim == 4 and blocks.shape[:-1] == scales.shape
        if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise ValueError(
                f"{BLOCKS} {tuple(blocks.shape)} of {blocks.dtype} beside {SCALES} "
                f"{tuple(scales.shape)} of {scales.dtype}"
            )
        table = E2M1_AS_E4M3.to(blocks.device)
        for pairs, powers in zip(blocks, scales.view(torch.float8_e8m0fnu), strict=True):
            numbers = torch.stack([pairs & LARGEST_UINT4, pairs >> 4], dim=-1).flatten(1)
            codes = table[numbers.int()].view(torch.float8_e4m3fn)
            groups = groups_in_order(codes.shape[1], 2 * pairs.shape[-1], codes)
            yield QuantizedWeight(codes, powers.float(), None, groups)
