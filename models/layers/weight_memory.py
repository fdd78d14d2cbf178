"""The storage format of a target's weights, and their memory once loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..load.checkpoint import TensorFiles, composite_type, read_config, resolve_model_path
from ..load.quantization_config import Quantization, read_quantization
from ..load.quantized_files import StoredModule, stored_modules
from ..load.quantized_layouts import KEPT_FILE, ZERO_POINT
from ..recurrence.modules import state_shape, stateful_modules
from ..recurrence.state_pool import StateShape
from .cpu_layers import cpu_obstacle
from .linear_layers import NONE, is_quantized
from .model_slice import DTYPES

SCALE_BYTES = 4
ZERO_BYTES = 1
# Of safetensors' types.
BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
# The tensor that holds a layout's codes, and those that hold its scales.
CODES = ("qweight", "weight_packed", "weight")
EMBEDDING = "model.embed_tokens.weight"
SCALES = ("scales", "weight_scale", "weight_scale_inv")
# Type and shape of tensors by name.
Headers = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Sizes of a target's weights, a tied output head counted once.

    stored_as      for display: `plain`, or the quantisation, its bits and groups
    stored_bytes   of the checkpoint's files
    num_weights    all of them; an output head that is stored counts as one of its own
    num_linear     those that `quantization: int8` keeps in a byte
    num_scales     scales of these
    kept_bytes     of all stages by CPU kernels, which keep small weights and a tied head of their
                   own, by `quantization`; None: the kernels do not know the model
    states         of each module that keeps a state of each text; mostly none
    """

    stored_as: str
    stored_bytes: int
    num_weights: int
    num_linear: int
    num_scales: int
    kept_bytes: Mapping[str, int] | None = None
    states: tuple[StateShape, ...] = ()

    def num_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Bytes of the weights of all stages, computed in `dtype`, however they are stored."""
        size = DTYPES[dtype].itemsize
        if quantization == "none":
            return self.num_weights * size
        kept = (self.num_weights - self.num_linear) * size
        return kept + self.num_linear + self.num_scales * SCALE_BYTES

    def state_bytes(self, dtype: str) -> tuple[int, int]:
        """Bytes of the states of a text, and of what is kept of a row, over all stages."""
        size = DTYPES[dtype].itemsize
        slots = (shape.slot_bytes(size) for shape in self.states)
        return sum(slots), sum(shape.row_bytes(size) for shape in self.states)


def read_weight_memory(model: str | Path) -> WeightMemory:
    """Of a model folder or hub id; no weight is read. Raises `CheckpointError`."""
    folder = resolve_model_path(model)
    config = read_config(folder)
    quantization = read_quantization(folder, config)
    files = TensorFiles(folder)
    if composite_type(folder, config) is not None:
        files.take_text_part()
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(config)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    knows = cpu_obstacle(config, "float32", torch.device("cpu")) is None
    beside = TensorFiles(folder, KEPT_FILE).headers() if (folder / KEPT_FILE).is_file() else {}
    kept = _kept_by_kernels(whole, files, quantization, beside) if knows else None
    if config.tie_word_embeddings and not files.has_head:
        parameters.pop("lm_head.weight", None)
    linear = [weight for name, weight in parameters.items() if is_quantized(whole, name)]
    return WeightMemory(
        stored_as="plain" if quantization is None else quantization.description,
        stored_bytes=files.num_bytes,
        num_weights=sum(parameter.numel() for parameter in parameters.values()),
        num_linear=sum(weight.numel() for weight in linear),
        num_scales=sum(len(weight) for weight in linear),
        kept_bytes=kept,
        states=tuple(state_shape(module, config.hidden_size) for module in stateful_modules(whole)),
    )


def _kept_by_kernels(
    whole: nn.Module, files: TensorFiles, quantization: Quantization | None, beside: Headers
) -> dict[str, int]:
    """`WeightMemory.kept_bytes`, without what fills up a last panel. `beside`: of `KEPT_FILE`."""
    headers = files.headers()
    modules = {} if quantization is None else stored_modules(files.names, quantization)
    sizes: dict[str, int] = {NONE: 0, "int8": 0}
    for name, weight in whole.named_parameters(remove_duplicate=False):
        owner = whole.get_submodule(name.rpartition(".")[0])
        size = weight.numel() * 4
        if weight.ndim == 2 and isinstance(owner, nn.Linear):
            if name in modules:
                size = _quantized_bytes(weight.shape, modules[name], headers)
            elif (stored := name if name in headers else EMBEDDING) + ".codes" in beside:
                size = _bytes_beside(stored, beside)
            # A tied head that is not stored is the embedding.
            elif headers.get(name, headers.get(EMBEDDING, ("", ())))[0] == "BF16":
                size = weight.numel() * 2
        sizes[NONE] += size
        is_rounded = is_quantized(whole, name)
        outputs = len(weight)
        sizes["int8"] += weight.numel() + outputs * SCALE_BYTES if is_rounded else size
    return sizes


def _bytes_beside(name: str, beside: Headers) -> int:
    """Of a GGUF file's weight, whose uint8 codes have 4 bits."""
    kind, shape = beside[f"{name}.codes"]
    size = prod(shape) // 2 if kind == "U8" else prod(shape)
    for part, number_bytes in (("scales", SCALE_BYTES), ("minima", 4), ("zeros", ZERO_BYTES)):
        size += prod(beside.get(f"{name}.{part}", ("", (0,)))[1]) * number_bytes
    return size


def _quantized_bytes(shape: torch.Size, module: StoredModule, headers: Headers) -> int:
    """Of codes, scales and zero points of a weight [outputs, inputs]."""
    outputs, inputs = shape
    parts = {part: headers[name] for part, name in module.parts.items()}
    # A part that is missing is an error when the weight loads.
    kind, codes = next((parts[part] for part in CODES if part in parts), ("", ()))
    _, scales = next((parts[part] for part in SCALES if part in parts), ("", ()))
    if outputs in scales:
        num_groups = prod(scales) // outputs
    else:
        # One for all, or blocks of outputs and inputs.
        num_groups = scales[1] if len(scales) == 2 else 1
    has_zeros = kind == "I32" or ZERO_POINT in parts
    # 2 bits are kept as 4.
    in_codes = max(prod(codes) * BYTES.get(kind, 1), outputs * inputs // 2)
    return in_codes + outputs * num_groups * (SCALE_BYTES + ZERO_BYTES * has_zeros)
