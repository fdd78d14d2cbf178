"""Any causal language model as transformers loads it, with optional int8 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ...core.errors import CheckpointError, ConfigError
from ..layers.int8_linear import NONE, Int8Linear, check_quantization
from ..layers.model_slice import DTYPES
from ..load.checkpoint import composite_type, read_config, resolve_model_path
from ..load.supported import SUPPORTED


def load_hosted_model(model: str | Path, dtype: str, device: str, quantization: str = NONE) -> Any:
    """The model, ready to run. Raises `CheckpointError`, or `ConfigError` naming the setting."""
    check_quantization(quantization)
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = resolve_model_path(model)
    config: Any = read_config(folder)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{folder}: {config.model_type!r} has an encoder; it cannot draft")
    if (kind := composite_type(folder, config)) is not None:
        raise CheckpointError(
            f"{folder}: of composite models only text parts of the kinds "
            f"{', '.join(sorted(SUPPORTED))} can draft; that of this {kind!r} is "
            f"{config.model_type!r}"
        )
    try:
        # Eager attention takes any mask; code in the checkpoint is never run.
        whole: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {error}") from error
    whole = whole.eval().to(device)
    if quantization != NONE:
        round_weights(whole)
    return whole


def round_weights(whole: Any) -> None:
    """Keep the weights of linear layers but the head in 8 bits."""
    head = whole.get_output_embeddings()
    for name, module in list(whole.named_modules()):
        linear = _linear(module) if isinstance(module, Conv1D) else module
        if not isinstance(linear, nn.Linear) or linear is head:
            continue
        rounded = Int8Linear(linear.weight.data)
        rounded.bias = linear.bias
        whole.set_submodule(name, rounded)


def _linear(module: Any) -> nn.Linear:
    """A linear layer of GPT-2, whose weight is transposed."""
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.data.t().contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear
