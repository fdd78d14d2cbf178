"""One stage's part of a transformers model, with only its own tensors in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...core.errors import CheckpointError, ConfigError
from ...kernels.elementwise.dispatch import load_elementwise
from ..attention import interface as attention
from ..load.checkpoint import TensorFiles, read_config, resolve_model_path
from ..load.partition import LayerSpan
from .fast_modules import FastLinear, can_be_fast, make_fast
from .fused_modules import can_be_fused, make_fused
from .int8_linear import check_quantization
from .weights import load_tensors

# Models whose forward is: embed, layers, norm, head. Each is tested against transformers; others
# may scale or add something between the parts, which calling the layers alone would lose.
SUPPORTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})
Projection = Callable[[Tensor], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class ModelSlice:
    """Modules of one stage; `embed` and `head` with `norm` only where the span has them.

    layer_types  the kind of attention of each layer (`full_attention`, ...), or None for all alike
    fast         the modules are those of `fast_modules.py` or `fused_modules.py`: no batch
                 dimension, flat rotations
    """

    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    layers: tuple[nn.Module, ...]
    layer_types: tuple[str | None, ...]
    rotary: nn.Module
    embed: nn.Module | None
    norm: nn.Module | None
    head: Projection | None
    fast: bool


def load_slice(
    model: str | Path, span: LayerSpan, dtype: str = "float32", device: str = "cpu",
    quantization: str = "none", *, fused: bool = False,
) -> ModelSlice:  # fmt: skip
    """Load a stage's modules; with `fused`, those of `fused_modules.py` where it knows them.

    Raises `CheckpointError`, or `ConfigError` (`dtype`, `span`, `quantization`).
    """
    check_quantization(quantization)
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = resolve_model_path(model)
    config = read_config(folder)
    _check_supported(config, folder)
    if span.num_layers != config.num_hidden_layers:
        raise ConfigError(
            "span", f"is of {span.num_layers} layers, the model has {config.num_hidden_layers}"
        )
    with init_empty_weights(include_buffers=False):
        whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    load_tensors(
        whole, span, TensorFiles(folder), DTYPES[dtype], torch.device(device),
        int8=quantization == "int8",
    )  # fmt: skip
    return cut_slice(whole.eval(), span, DTYPES[dtype], torch.device(device), fused=fused)


def cut_slice(
    whole: Any, span: LayerSpan, dtype: torch.dtype, device: torch.device, *, fused: bool
) -> ModelSlice:
    """The stage's modules of a model of which they alone have their tensors."""
    inner = whole.base_model
    layers = inner.layers[span.first : span.last]
    for index, layer in enumerate(layers):
        layer.self_attn.draftline_layer = index
    fused = fused and can_be_fused(layers[0])
    fast = not fused and can_be_fast(layers[0], dtype, device)

    def ready(module: nn.Module) -> nn.Module:
        module = module.to(device)
        if fused:
            return make_fused(module, load_elementwise("triton"))
        return make_fast(module) if fast else module

    types = getattr(whole.config, "layer_types", None) or [None] * span.num_layers
    return ModelSlice(
        config=whole.config,
        dtype=dtype,
        device=device,
        layers=tuple(map(ready, layers)),
        layer_types=tuple(types[span.first : span.last]),
        rotary=inner.rotary_emb.to(device),
        embed=inner.embed_tokens.to(device) if span.is_first else None,
        norm=ready(inner.norm) if span.is_last else None,
        head=_head(whole.lm_head.to(device), fast) if span.is_last else None,
        fast=fast or fused,
    )


def _head(linear: nn.Linear, fast: bool) -> Projection:
    return FastLinear(linear) if fast else linear


def _check_supported(config: Any, folder: Path) -> None:
    if config.model_type not in SUPPORTED:
        raise CheckpointError(
            f"{folder}: model_type {config.model_type!r} is not supported; "
            f"supported are {', '.join(sorted(SUPPORTED))}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{folder}: quantised checkpoints are not supported; give the unquantised model"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise CheckpointError(f"{folder}: use_bidirectional_attention is not a causal model")
    for rope_type in _rope_types(config):
        # These scale by the longest sequence of the batch: a text would depend on its neighbours.
        if rope_type in ("dynamic", "longrope"):
            raise CheckpointError(f"{folder}: rope_type {rope_type!r} is not supported")


def _rope_types(config: Any) -> set[str | None]:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {kind.get("rope_type") for kind in kinds}
