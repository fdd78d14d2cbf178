"""The tensors of a quantised checkpoint, read as if it were a plain one; scales of FP8 caches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ...core.errors import CheckpointError
from ...kernels.small_codes import E2M1_AS_E4M3, LARGEST_UINT4
from .checkpoint import KV_SCALES, TensorFiles, WeightFiles, composite_type, listed
from .quantization_config import Quantization, read_quantization
from .quantized_layouts import (
    KEPT_FILE,
    WEIGHT,
    Layout,
    QuantizedWeight,
    groups_in_order,
    is_one_byte,
    kept_weight,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A module whose weight is quantised: its layout, and the checkpoint's names of its parts."""

    layout: Layout
    parts: dict[str, str]  # last part of the name -> name


def open_weights(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> WeightFiles:
    """The weights of a model folder, quantised or not; quantised ones come in `dtype`.

    Of a composite model those of its text part, whose config is `config`. Raises `CheckpointError`.
    """
    quantization = read_quantization(folder, config)
    files = TensorFiles(folder)
    if composite_type(folder, config) is not None:
        files.take_text_part()
    if quantization is None:
        return KeptFiles(files) if (folder / KEPT_FILE).is_file() else files
    logger.info("event=quantized_weights stored_as=%r", quantization.description)
    if not quantization.layouts:
        return Mxfp4Files(files, dtype, device)
    return QuantizedFiles(files, quantization, dtype, device)


class KeptFiles:
    """A plain checkpoint that has codes and scales of its matrices beside (`KEPT_FILE`).

    quantized  the names of these matrices
    """

    def __init__(self, files: TensorFiles) -> None:
        """Raises `CheckpointError`."""
        self._files, self._kept = files, TensorFiles(files.folder, KEPT_FILE)
        self.folder, self.names = files.folder, files.names
        owners = {name.rpartition(".")[0] for name in self._kept.names}
        self.quantized = frozenset(owners & self.names)

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored."""
        return self._files.is_incidental(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors in floating point. Raises `CheckpointError`."""
        return self._files.read(names)

    def read_quantized(self, name: str) -> QuantizedWeight:
        """A weight of `quantized`. Raises `CheckpointError`."""
        parts = [stored for stored in self._kept.names if stored.rpartition(".")[0] == name]
        try:
            return kept_weight(name, dict(self._kept.read(parts)))
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder / KEPT_FILE}: {name}: {error}; remove the folder, so that the model "
                "is unpacked again"
            ) from error


class QuantizedFiles:
    """Plain names over quantised tensors: `x.qweight`, `x.scales`, ... are read as `x.weight`.

    A weight's parts are read and dequantised on `device` on request, one weight at a time. Modules
    that the quantiser left out have plain weights, which are read as they are.

    quantized  the plain names of quantised weights
    """

    def __init__(
        self, files: TensorFiles, quantization: Quantization,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._files = files
        self._dtype = dtype
        self._device = device
        self._extra_biases = quantization.extra_biases
        self._modules = stored_modules(files.names, quantization)
        self.quantized = frozenset(self._modules)
        hidden = {name for module in self._modules.values() for name in module.parts.values()}
        self.folder = files.folder
        self.names = (
            frozenset(
                name for name in files.names - hidden if _suffix(name) not in quantization.ignored
            )
            | self.quantized
        )

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored.

        GPTQ's tools write a bias of zeros for modules that have none.
        """
        if self._files.is_incidental(name):
            return True
        module, _, attribute = name.rpartition(".")
        if not self._extra_biases or attribute != "bias" or f"{module}.weight" not in self._modules:
            return False
        return not dict(self._files.read([name]))[name].any()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, plain ones as they are stored. All names must be in `names`.

        Raises `CheckpointError` naming the parts that are missing or do not fit each other.
        """
        wanted = list(names)
        quantized = [name for name in wanted if name in self._modules]
        self._check_parts(quantized)
        for name, tensor in self._files.read([one for one in wanted if one not in self._modules]):
            if is_one_byte(tensor):
                raise CheckpointError(
                    f"{self.folder}: tensor {name} is {tensor.dtype} and has no scale; "
                    "fetch the checkpoint again"
                )
            yield name, tensor
        for name in quantized:
            yield name, self._quantized(name).dequantized(self._dtype)

    def read_quantized(self, name: str) -> QuantizedWeight:
        """A weight of `quantized`, not dequantised. Raises `CheckpointError` as `read`."""
        self._check_parts([name])
        return self._quantized(name)

    def _check_parts(self, names: Iterable[str]) -> None:
        missing = [
            f"{name.removesuffix(WEIGHT)}{part}"
            for name in names
            for part in sorted(self._modules[name].layout.names.required)
            if part not in self._modules[name].parts
        ]
        if missing:
            raise CheckpointError(f"{self.folder}: {listed(missing)} missing; fetch it again")

    def _quantized(self, name: str) -> QuantizedWeight:
        module = self._modules[name]
        last_part = {stored: part for part, stored in module.parts.items()}
        stored = self._files.read(module.parts.values())
        parts = {last_part[one]: tensor.to(self._device) for one, tensor in stored}
        try:
            return module.layout.weight(parts)
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder}: tensors of {name.removesuffix('.weight')} do not fit each other: "
                f"{error}; fetch the checkpoint again"
            ) from error


def stored_modules(names: frozenset[str], quantization: Quantization) -> dict[str, StoredModule]:
    """By the plain name of their weight."""
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        parts.setdefault(module, {})[suffix] = name
    found = {}
    for module, by_suffix in parts.items():
        for layout in quantization.layouts:
            if layout.names.own.isdisjoint(by_suffix):
                continue
            known = layout.names.required | layout.names.optional
            if WEIGHT in by_suffix and WEIGHT not in known:
                raise CheckpointError(f"{module} has a plain weight beside a quantised one")
            kept = {suffix: name for suffix, name in by_suffix.items() if suffix in known}
            found[f"{module}.{WEIGHT}"] = StoredModule(layout, kept)
            break
    return found


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


BLOCKS, SCALES = "_blocks", "_scales"
# An exponent, and the bits of 2^-127 as a float32.
NOT_A_NUMBER, LEAST_POWER = 255, 1 << 22


class Mxfp4Files:
    """`x_blocks` and `x_scales` are read as `x`, [experts, inputs, outputs] in `dtype`.

    x_blocks  uint8 [experts, outputs, groups, 16]  two codes of e2m1 a byte, the low one first
    x_scales  uint8 [experts, outputs, groups]      exponents, from -127 on

    packed    the names of these x
    """

    def __init__(self, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> None:
        """`device`: where the numbers are computed. Raises `CheckpointError` for lost scales."""
        self._files, self._dtype, self._device = files, dtype, device
        stored = files.names
        self.packed = frozenset(
            name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)
        )
        missing = sorted({f"{name}{SCALES}" for name in self.packed} - stored)
        if missing:
            raise CheckpointError(f"{files.folder}: {listed(missing)} missing; fetch it again")
        parts = {f"{name}{part}" for name in self.packed for part in (BLOCKS, SCALES)}
        self.folder, self.names = files.folder, (stored - parts) | self.packed

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored."""
        return self._files.is_incidental(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, in any order. Raises `CheckpointError`."""
        wanted = set(names)
        yield from self._files.read(wanted - self.packed)
        for name in sorted(wanted & self.packed):
            values = [weight.dequantized(self._dtype).t() for weight in self.read_quantized(name)]
            yield name, torch.stack(values)

    def read_quantized(self, name: str) -> Iterator[QuantizedWeight]:
        """The weights [outputs, inputs] of the experts of one of `packed`; the codes are of e4m3,
        which has all numbers of e2m1. Raises `CheckpointError`."""
        both = dict(self._files.read([f"{name}{BLOCKS}", f"{name}{SCALES}"]))
        blocks, scales = (both[f"{name}{part}"] for part in (BLOCKS, SCALES))
        fits = blocks.ndim == 4 and blocks.shape[:-1] == scales.shape
        if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise CheckpointError(
                f"{self.folder}: tensors of {name} do not fit each other; fetch the "
                "checkpoint again"
            )
        if (scales == NOT_A_NUMBER).any():
            raise CheckpointError(
                f"{self.folder}: {name}{SCALES} has one that is no number; fetch the checkpoint "
                "again"
            )
        table = E2M1_AS_E4M3.to(self._device)
        for own, exponents in zip(blocks, scales, strict=True):
            pairs = own.to(self._device)
            numbers = torch.stack([pairs & LARGEST_UINT4, pairs >> 4], dim=-1).flatten(1)
            codes = table[numbers.int()].view(torch.float8_e4m3fn)
            bits = exponents.to(self._device).int() << 23
            powers = bits.clamp(min=LEAST_POWER).view(torch.float32)
            groups = groups_in_order(codes.shape[1], 2 * own.shape[-1], codes)
            yield QuantizedWeight(codes, powers, None, groups)


def read_kv_scales(
    files: WeightFiles, prefix: str, first: int, last: int, num_kv_heads: int
) -> Tensor | None:
    """The divisors of keys and values that a checkpoint was calibrated with; None: it has none.

    float32 [layers, 2, kv_heads] of layers `first` to before `last`, for caches of FP8 numbers.
    compressed-tensors' tools write them beside the weights, one number or one a head. Layers that
    have none get 1. Raises `CheckpointError` for scales that fit no head, or are not above 0.
    """
    names = [
        [f"{prefix}.layers.{layer}.self_attn.{kind}" for kind in KV_SCALES]
        for layer in range(first, last)
    ]
    there = [name for pair in names for name in pair if name in files.names]
    if not there:
        return None
    found = {name: tensor.float().reshape(-1) for name, tensor in files.read(there)}
    for name, scale in found.items():
        if len(scale) not in (1, num_kv_heads) or not (scale > 0).all():
            raise CheckpointError(
                f"{files.folder}: tensor {name} is no scale above 0, or {num_kv_heads} of them; "
                "fetch the checkpoint again"
            )
    one = torch.ones(1)
    rows = [[found.get(name, one).expand(num_kv_heads) for name in pair] for pair in names]
    return torch.stack([torch.stack(pair) for pair in rows])
