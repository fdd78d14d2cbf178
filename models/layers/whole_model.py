"""A whole target as a transformers model, for uses outside the engine's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..load.checkpoint import read_config, resolve_model_path
from ..load.partition import LayerSpan
from ..load.quantized_files import open_weights
from .model_slice import load_tensors


def load_whole_model(
    model: str | Path, dtype: torch.dtype = torch.float32, *, attention: str | None = None
) -> PreTrainedModel:
    """The model on the CPU, in `dtype` also where its checkpoint is quantised, for inference.

    attention  transformers' name of an implementation; None: the one that it picks

    Raises `CheckpointError`.
    """
    folder, device = resolve_model_path(model), torch.device("cpu")
    config = read_config(folder)
    files = open_weights(folder, config, dtype, device)
    with init_empty_weights(include_buffers=False):
        whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    span = LayerSpan(0, config.num_hidden_layers, config.num_hidden_layers)
    load_tensors(whole, span, files, dtype, device)
    return whole.eval()
