"""The tensors of a quantised checkpoint, read as if it were a plain one; scales of FP8 caches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ...core.errors import CheckpointError
from .checkpoint import KV_SCALES, TensorFiles, WeightFiles, composite_type, listed
from .quantization_config import Quantization, read_quantization
from .quantized_layouts import (
    KEPT_FILE,
    KEPT_PARTS,
    WEIGHT,
    ExpertsLayout,
    Layout,
    QuantizedWeight,
    is_one_byte,
    kept_weight,
)

logger = logging.getLogger(__name__)


LayoutOf = TypeVar("LayoutOf", Layout, ExpertsLayout)


@dataclass(frozen=True, slots=True)
class StoredWeight(Generic[LayoutOf]):
    """A quantised weight, or the matrices of all experts of a layer, in several tensors.

    owner  how their names begin
    parts  by the last part of their name: the name
    """

    owner: str
    layout: LayoutOf
    parts: dict[str, str]

    @property
    def missing(self) -> list[str]:
        """Names of parts that it cannot be read without."""
        return [
            self.owner + part for part in sorted(self.layout.names.required - self.parts.keys())
        ]


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
    return QuantizedFiles(files, quantization, dtype, device)


class KeptFiles:
    """A plain checkpoint that has codes and scales of its matrices beside (`KEPT_FILE`).

    quantized  the names of these matrices
    experts    those of tensors with the matrices of all experts of a layer
    """

    def __init__(self, files: TensorFiles) -> None:
        """Raises `CheckpointError`."""
        self._files, self._kept = files, TensorFiles(files.folder, KEPT_FILE)
        self.folder, self.names = files.folder, files.names
        owners = {name.rpartition(".")[0] for name in self._kept.names}
        self.quantized = frozenset(owners & self.names)
        self.experts = frozenset({name.rpartition(".")[0] for name in owners} & self.names)

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored."""
        return self._files.is_incidental(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors in floating point. Raises `CheckpointError`."""
        return self._files.read(names)

    def read_quantized(self, name: str) -> QuantizedWeight:
        """A weight of `quantized`. Raises `CheckpointError`."""
        return self._weight(name, self._parts_of(name))

    def read_experts(self, name: str) -> Iterator[Sequence[QuantizedWeight]]:
        """Of each expert of one of `experts` the parts whose outputs lie side by side. Raises
        `CheckpointError`."""
        numbers = {one.removeprefix(f"{name}.").partition(".")[0] for one in self._kept.names}
        owners = [f"{name}.{number}" for number in sorted(filter(str.isdecimal, numbers))]
        whole = {owner: self._parts_of(owner) for owner in owners}
        count = min(len(tensor) for parts in whole.values() for tensor in parts.values())
        for expert in range(count):
            yield [
                self._weight(owner, {part: tensor[expert] for part, tensor in parts.items()})
                for owner, parts in whole.items()
            ]

    def _parts_of(self, owner: str) -> dict[str, Tensor]:
        return dict(
            self._kept.read(
                f"{owner}.{part}" for part in KEPT_PARTS if f"{owner}.{part}" in self._kept.names
            )
        )

    def _weight(self, owner: str, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        try:
            return kept_weight(owner, parts)
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder / KEPT_FILE}: {owner}: {error}; remove the folder, so that the "
                "model is unpacked again"
            ) from error


class QuantizedFiles:
    """Plain names over quantised tensors: `x.qweight`, `x.scales`, ... are read as `x.weight`.

    A weight's parts are read and dequantised on `device` on request, one weight at a time. Modules
    that the quantiser left out have plain weights, which are read as they are.

    quantized  the plain names of quantised weights
    experts    those of tensors with the matrices of all experts of a layer
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
        self._experts = stored_experts(files.names, quantization)
        self.quantized, self.experts = frozenset(self._modules), frozenset(self._experts)
        stored = [*self._modules.values(), *self._experts.values()]
        hidden = {name for one in stored for name in one.parts.values()}
        plain = {name for name in files.names - hidden if _suffix(name) not in quantization.ignored}
        self.folder = files.folder
        self.names = self.quantized | self.experts | plain

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
        experts = [name for name in wanted if name in self._experts]
        self._check_parts([self._modules[name] for name in quantized])
        plain = [name for name in wanted if name not in self.quantized | self.experts]
        for name, tensor in self._files.read(plain):
            if is_one_byte(tensor):
                raise CheckpointError(
                    f"{self.folder}: tensor {name} is {tensor.dtype} and has no scale; "
                    "fetch the checkpoint again"
                )
            yield name, tensor
        for name in quantized:
            yield name, self.read_quantized(name).dequantized(self._dtype)
        for name in experts:
            values = [one.dequantized(self._dtype) for [one] in self.read_experts(name)]
            is_turned = self._experts[name].layout.is_turned
            yield name, torch.stack([one.t() for one in values] if is_turned else values)

    def read_quantized(self, name: str) -> QuantizedWeight:
        """A weight of `quantized`, not dequantised. Raises `CheckpointError` as `read`."""
        stored = self._modules[name]
        parts = self._parts(stored)
        with self._naming(stored):
            return stored.layout.weight(parts)

    def read_experts(self, name: str) -> Iterator[Sequence[QuantizedWeight]]:
        """Of each expert of one of `experts` the parts whose outputs lie side by side. Raises
        `CheckpointError` as `read`."""
        stored = self._experts[name]
        parts = self._parts(stored)
        with self._naming(stored):
            for weight in stored.layout.weights(parts):
                yield [weight]

    def _check_parts(self, stored: Iterable[StoredWeight]) -> None:
        missing = [part for one in stored for part in one.missing]
        if missing:
            raise CheckpointError(f"{self.folder}: {listed(missing)} missing; fetch it again")

    def _parts(self, stored: StoredWeight) -> dict[str, Tensor]:
        self._check_parts([stored])
        last_part = {name: part for part, name in stored.parts.items()}
        read = self._files.read(stored.parts.values())
        return {last_part[name]: tensor.to(self._device) for name, tensor in read}

    @contextmanager
    def _naming(self, stored: StoredWeight) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder}: tensors of {stored.owner.removesuffix('.')} do not fit each "
                f"other: {error}; fetch the checkpoint again"
            ) from error


def stored_experts(
    names: frozenset[str], quantization: Quantization
) -> dict[str, StoredWeight[ExpertsLayout]]:
    """By the name of the matrices of all experts."""
    found: dict[str, StoredWeight[ExpertsLayout]] = {}
    for layout in quantization.experts:
        endings = layout.names.required | layout.names.optional
        for own in layout.names.own:
            owners = {name.removesuffix(own) for name in names if name.endswith(own)}
            for owner in owners:
                # Of a module's weight the scales are called so, too.
                if _suffix(owner) != WEIGHT:
                    parts = {end: owner + end for end in endings if owner + end in names}
                    found[owner] = StoredWeight(owner, layout, parts)
    return found


def stored_modules(
    names: frozenset[str], quantization: Quantization
) -> dict[str, StoredWeight[Layout]]:
    """By the plain name of their weight."""
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        parts.setdefault(module, {})[suffix] = name
    found: dict[str, StoredWeight[Layout]] = {}
    for module, by_suffix in parts.items():
        for layout in quantization.layouts:
            if layout.names.own.isdisjoint(by_suffix):
                continue
            known = layout.names.required | layout.names.optional
            if WEIGHT in by_suffix and WEIGHT not in known:
                raise CheckpointError(f"{module} has a plain weight beside a quantised one")
            kept = {suffix: name for suffix, name in by_suffix.items() if suffix in known}
            found[f"{module}.{WEIGHT}"] = StoredWeight(f"{module}.", layout, kept)
            break
    return found


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


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
