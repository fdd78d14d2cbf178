"""The models that draftline's stages support, and what one without weights is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...core.errors import CheckpointError, UnsupportedModel
from ..attention.backend import NAME as ATTENTION
from .checkpoint import composite_type

# Models whose forward is embed, layers, norm, head: their layers run one after the other, by
# draftline's own modules and kernels where these know them. Others run by transformers' forward.
LAYER_BY_LAYER = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})


# Types of layers that keep a state of each text beside keys and values, or in their place.
STATEFUL = frozenset({"linear_attention", "hybrid", "conv"})

# What modelling code raises that is called otherwise than it expects.
FAULTS = (
    AssertionError, AttributeError, IndexError, KeyError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip


def keeps_states(config: PretrainedConfig) -> bool:
    """Whether layers of a model keep states of texts."""
    return not STATEFUL.isdisjoint(getattr(config, "layer_types", None) or ())


def runs_by_layers(config: PretrainedConfig) -> bool:
    """Whether the layers of a model alone are needed to run them."""
    return config.model_type in LAYER_BY_LAYER


def check_supported(config: PretrainedConfig, folder: Path) -> None:
    """Raise `CheckpointError` for settings of a model with which a text would depend on others."""
    for rope_type in _rope_types(config):
        # These scale by the longest sequence of the batch.
        if rope_type in ("dynamic", "longrope"):
            raise CheckpointError(f"{folder}: rope_type {rope_type!r} is not supported")


@contextmanager
def naming(folder: Path, config: PretrainedConfig) -> Iterator[None]:
    """A context in which a refusal names the folder, and the composite model that `config` is of.

    Raises `CheckpointError`.
    """
    try:
        yield
    except UnsupportedModel as error:
        whole = composite_type(folder, config)
        of = "" if whole is None else f"the text part of model_type {whole!r}, "
        raise CheckpointError(f"{folder}: {of}{error}") from error


def _rope_types(config: Any) -> set[str | None]:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {kind.get("rope_type") for kind in kinds}


def empty_model(config: PretrainedConfig) -> Any:
    """The model with draftline's attention, its parameters on the meta device.

    Raises `UnsupportedModel` where transformers has no such model, or its attention cannot be ours.
    """
    try:
        with torch.device("meta"):
            whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise UnsupportedModel(config.model_type, str(error).splitlines()[0]) from error
    for module in whole.modules():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(config.model_type, "its attention is not causal")
    _compute_buffers(whole)
    return whole.eval()


@torch.no_grad()
def _compute_buffers(whole: Any) -> None:
    """Frequencies of rotary positions and the like, as `from_pretrained` computes them."""
    # The base model may fill those of its layers.
    holders = [whole.base_model]
    for module in whole.modules():
        buffers = list(module.named_buffers(recurse=False))
        for name, buffer in buffers:
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        if buffers:
            holders.append(module)
    for module in holders:
        whole._init_weights(module)  # noqa: SLF001 - transformers has no public name for it


def base_and_layers(whole: Any) -> tuple[str, nn.ModuleList]:
    """The name of what is below the head, and the decoder layers in it.

    Raises `UnsupportedModel` where these are not one list.
    """
    count = whole.config.num_hidden_layers
    for name, base in whole.named_children():
        # Outermost first: experts may be as many.
        for module in base.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return name, module
    raise UnsupportedModel(whole.config.model_type, f"its {count} layers are not one list")


def layer_sizes(config: PretrainedConfig) -> list[int]:
    """Weights of each decoder layer, those of all experts. Raises `UnsupportedModel`."""
    _, layers = base_and_layers(empty_model(config))
    return [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
