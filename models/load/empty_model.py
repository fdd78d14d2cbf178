"""A model of transformers without weights, to ask what it is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...core.errors import UnsupportedModel
from ..attention.backend import NAME as ATTENTION


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
        _compute_buffers(whole, module)
    return whole.eval()


@torch.no_grad()
def _compute_buffers(whole: Any, module: nn.Module) -> None:
    """Frequencies of rotary positions and the like, as `from_pretrained` computes them."""
    buffers = list(module.named_buffers(recurse=False))
    for name, buffer in buffers:
        setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    if buffers:
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
