"""The storage format of a target's weights, and their memory once loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..load.checkpoint import TensorFiles, read_config, resolve_model_path
from ..load.quantization_config import read_quantization
from .linear_layers import is_quantized
from .model_slice import DTYPES

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Sizes of a target's weights, a tied output head counted once.

    stored_as      for display: `plain`, or the quantisation, its bits and groups
    stored_bytes   of the checkpoint's files
    num_weights    all of them; an output head that is stored counts as one of its own
    num_linear     those that `quantization: int8` keeps in a byte
    num_scales     scales of these
    """

    stored_as: str
    stored_bytes: int
    num_weights: int
    num_linear: int
    num_scales: int

    def num_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Bytes of the weights of all stages, computed in `dtype`, however they are stored."""
        size = DTYPES[dtype].itemsize
        if quantization == "none":
            return self.num_weights * size
        kept = (self.num_weights - self.num_linear) * size
        return kept + self.num_linear + self.num_scales * SCALE_BYTES


def read_weight_memory(model: str | Path) -> WeightMemory:
    """Of a model folder or hub id; no weight is read. Raises `CheckpointError`."""
    folder = resolve_model_path(model)
    config = read_config(folder)
    quantization = read_quantization(folder, config)
    files = TensorFiles(folder)
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(config)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    if config.tie_word_embeddings and not files.has_head:
        parameters.pop("lm_head.weight", None)
    linear = [weight for name, weight in parameters.items() if is_quantized(whole, name)]
    return WeightMemory(
        stored_as="plain" if quantization is None else quantization.description,
        stored_bytes=files.num_bytes,
        num_weights=sum(parameter.numel() for parameter in parameters.values()),
        num_linear=sum(weight.numel() for weight in linear),
        num_scales=sum(len(weight) for weight in linear),
    )
