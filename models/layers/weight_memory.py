"""The storage format of a target's weights, and their memory once loaded; what a token takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..load.checkpoint import TensorFiles, composite_type, read_config, resolve_model_path
from ..load.converted_files import converted
from ..load.expert_weights import StoredExperts
from ..load.model_info import KvShape, kv_shape
from ..load.quantization_config import Quantization, read_quantization
from ..load.quantized_files import (
    StoredWeight,
    open_weights,
    stored_experts,
    stored_modules,
)
from ..load.quantized_layouts import KEPT_FILE, ZERO_POINT, ExpertsLayout, Layout
from ..load.rounding import GROUP_SIZE
from ..load.supported import base_and_layers, runs_by_layers
from ..recurrence.modules import state_shape, stateful_modules
from ..recurrence.state_pool import StateShape
from .base_forward import attending_layers
from .cpu_layers import cpu_obstacle
from .experts import ExpertForm, can_compute_experts, has_experts
from .linear_layers import NONE, QUANTIZATIONS, can_keep, is_quantized
from .model_slice import DTYPES

# The name of draftline's package.
PACKAGE = __name__.partition(".models.")[0]
SCALE_BYTES = 4
ZERO_BYTES = 1
# Of safetensors' types.
BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
# Of rounded weights: bits of a number, bytes of a group's scale and zero point.
ROUNDED = {"int8": (8, SCALE_BYTES), "fp8": (8, SCALE_BYTES), "int4": (4, SCALE_BYTES + ZERO_BYTES)}
# The tensor that holds a layout's codes, and those that hold its scales.
CODES = ("qweight", "weight_packed", "weight", "", "_blocks")
# Names of tensors in models that run layer by layer.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCALES = ("scales", "weight_scale", "weight_scale_inv", "_scale_inv", "_scales")
# Types of scales that are powers of two, and take a byte.
EXPONENTS = ("U8", "F8_E8M0")
# Type and shape of tensors by name.
Headers = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Sizes of a target's weights, as the stages of a device keep them.

    stored_as     for display: `plain`, or the quantisation, its bits and groups
    stored_bytes  of the checkpoint's files
    sizes         bytes of each tensor, by `quantization` that the device has and by name. A tied
                  output head is counted where it is a tensor of its own
    kv            what a layer with attention keeps of a token
    num_kv_layers
    states        of each module that keeps a state of each text; mostly none
    widened       why experts that are stored quantised are not kept so; None: there are none
    """

    stored_as: str
    stored_bytes: int
    sizes: Mapping[str, Mapping[str, int]]
    kv: KvShape
    num_kv_layers: int
    states: tuple[StateShape, ...] = ()
    widened: str | None = None

    def num_bytes(self, quantization: str = NONE) -> int:
        """Bytes of the weights of all stages."""
        return sum(self.sizes[quantization].values())

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of a token's keys and values, or latents, over all stages."""
        return self.num_kv_layers * self.kv.num_numbers * DTYPES[dtype].itemsize

    def state_bytes(self, dtype: str) -> tuple[int, int]:
        """Bytes of the states of a text, and of what is kept of a row, over all stages."""
        size = DTYPES[dtype].itemsize
        slots = (shape.slot_bytes(size) for shape in self.states)
        return sum(slots), sum(shape.row_bytes(size) for shape in self.states)


def held_bytes(*holders: object) -> int:
    """Bytes of the tensors that modules and layers hold, each once; none of meta tensors."""
    found, seen, rest = dict[int, int](), set[int](), [*holders]
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if not one.is_meta:
                found[one.data_ptr()] = one.nbytes
        elif isinstance(one, list | tuple):
            rest += one
        elif isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, nn.Module) or type(one).__module__.startswith(PACKAGE):
            slots = getattr(type(one), "__slots__", ())
            rest += [getattr(one, slot) for slot in slots if hasattr(one, slot)]
            rest.append(getattr(one, "__dict__", None))
    return sum(found.values())


def read_weight_memory(
    model: str | Path, device: str = "cpu", dtype: str = "float32"
) -> WeightMemory:
    """Of a model folder or hub id whose stages compute in `dtype` on a device; no weight is read.

    Raises `CheckpointError`.
    """
    folder = resolve_model_path(model)
    config = read_config(folder)
    stored = _Stored.read(folder, config)
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(config)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    by_kernels = cpu_obstacle(config, dtype, torch.device(device)) is None
    mixes = can_compute_experts(dtype, device) and not by_kernels and has_experts(config)
    keeps_head = by_kernels or (device == "cuda" and runs_by_layers(config))
    keeps_others = mixes or device == "cuda"
    has_own_head = by_kernels or stored.files.has_head or (keeps_head and stored.has_codes(HEAD))
    if config.tie_word_embeddings and not has_own_head:
        parameters.pop(HEAD, None)
    sizes: dict[str, dict[str, int]] = {}
    files = converted(open_weights(folder, config, DTYPES[dtype], torch.device("cpu")), whole)
    widened: str | None = None
    for quantization in QUANTIZATIONS:
        form = ExpertForm(
            DTYPES[dtype], torch.device(device), quantization,
            by_kernels=can_compute_experts(dtype, device),
        )  # fmt: skip
        chosen = form.choose(whole, parameters, files)
        experts = {one.name: one for matrices in chosen.kept.values() for one in matrices}
        if quantization == NONE:
            widened = next(iter(+chosen.widened), None)
        sizes[quantization] = {
            name: stored.expert_bytes(experts[name], quantization)
            if name in experts
            else rounded_bytes(weight.shape, quantization)
            if quantization != NONE and is_quantized(whole, name)
            else stored.kept_bytes(name, weight.shape)
            if (keeps_head or (keeps_others and name != HEAD))
            and can_keep(whole, name)
            and (by_kernels or stored.has_codes(name))
            else weight.numel() * DTYPES[dtype].itemsize
            for name, weight in parameters.items()
        }
    states = tuple(state_shape(module, config.hidden_size) for module in stateful_modules(whole))
    num_kv_layers = len(attending_layers(tuple(base_and_layers(whole)[1])))
    return WeightMemory(
        stored.description, stored.files.num_bytes, sizes, kv_shape(config), num_kv_layers, states,
        widened,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a checkpoint has of its weights.

    beside  of `KEPT_FILE`
    """

    files: TensorFiles
    quantization: Quantization | None
    headers: Headers
    modules: Mapping[str, StoredWeight[Layout]]
    experts: Mapping[str, StoredWeight[ExpertsLayout]]
    beside: Headers

    @classmethod
    def read(cls, folder: Path, config: PretrainedConfig) -> _Stored:
        quantization = read_quantization(folder, config)
        files = TensorFiles(folder)
        if composite_type(folder, config) is not None:
            files.take_text_part()
        modules = {} if quantization is None else stored_modules(files.names, quantization)
        experts = {} if quantization is None else stored_experts(files.names, quantization)
        has_kept = (folder / KEPT_FILE).is_file()
        beside = TensorFiles(folder, KEPT_FILE).headers() if has_kept else {}
        return cls(files, quantization, files.headers(), modules, experts, beside)

    @property
    def description(self) -> str:
        """`WeightMemory.stored_as`."""
        if self.quantization is not None:
            return self.quantization.description
        return "blocks of a GGUF file" if self.beside else "plain"

    def has_codes(self, name: str) -> bool:
        """Whether a weight is stored quantised."""
        return name in self.modules or f"{self._stored(name)}.codes" in self.beside

    def _stored(self, name: str) -> str:
        # A tied head that is not stored is the embedding.
        return name if name in self.headers else EMBEDDING

    def expert_bytes(self, experts: StoredExperts, quantization: str) -> int:
        """Of a matrix of all experts that are kept."""
        shape, count = experts.expert_shape, experts.shape[0]
        if quantization != NONE:
            return count * rounded_bytes(shape, quantization)
        _, sources = experts.sources()
        if not isinstance(sources, str):
            part = torch.Size((shape[0] // len(sources[0]), shape[1]))
            return sum(self.kept_bytes(name, part) for parts in sources for name in parts)
        if sources in self.experts:
            whole = torch.Size((count * shape[0], shape[1]))
            return _quantized_bytes(whole, self.experts[sources], self.headers)
        beside = [f"{sources}.{part}" for part in range(2)]
        if f"{beside[0]}.codes" in self.beside:
            return sum(_bytes_beside(name, self.beside) for name in beside)
        return self.kept_bytes(sources, experts.shape)

    def kept_bytes(self, name: str, shape: torch.Size) -> int:
        """Of a linear layer's weight, without what fills up a last panel or tile. Scales count 32
        bits, though some are kept in 16."""
        if name in self.modules:
            return _quantized_bytes(shape, self.modules[name], self.headers)
        stored = self._stored(name)
        if f"{stored}.codes" in self.beside:
            return _bytes_beside(stored, self.beside)
        is_half = self.headers.get(stored, ("", ()))[0] == "BF16"
        return prod(shape) * (2 if is_half else 4)


def rounded_bytes(shape: Sequence[int], quantization: str) -> int:
    """Of a weight [outputs, inputs], or of one that is turned."""
    bits, scale_bytes = ROUNDED[quantization]
    outputs, inputs = shape
    return outputs * inputs * bits // 8 + outputs * -(-inputs // GROUP_SIZE) * scale_bytes


def _bytes_beside(name: str, beside: Headers) -> int:
    """Of a GGUF file's weight, whose uint8 codes have 4 bits."""
    kind, shape = beside.get(f"{name}.codes", ("", (0,)))
    size = prod(shape) // 2 if kind == "U8" else prod(shape)
    for part, number_bytes in (("scales", SCALE_BYTES), ("minima", 4), ("zeros", ZERO_BYTES)):
        size += prod(beside.get(f"{name}.{part}", ("", (0,)))[1]) * number_bytes
    return size


def _quantized_bytes(shape: torch.Size, stored: StoredWeight, headers: Headers) -> int:
    """Of codes, scales and zero points of a weight [outputs, inputs]."""
    outputs, inputs = shape
    parts = {part: headers[name] for part, name in stored.parts.items()}
    # A part that is missing is an error when the weight loads.
    kind, codes = next((parts[part] for part in CODES if part in parts), ("", ()))
    scale_kind, scales = next((parts[part] for part in SCALES if part in parts), ("", ()))
    scale_bytes = 1 if scale_kind in EXPONENTS else SCALE_BYTES
    if outputs in scales:
        num_groups = prod(scales) // outputs
    else:
        # One for all, or blocks of outputs and inputs.
        num_groups = scales[-1] if len(scales) > 1 else 1
    has_zeros = kind == "I32" or ZERO_POINT in parts
    # 2 bits are kept as 4.
    in_codes = max(prod(codes) * BYTES.get(kind, 1), outputs * inputs // 2)
    return in_codes + outputs * num_groups * (scale_bytes + ZERO_BYTES * has_zeros)
