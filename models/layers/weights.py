"""Reads a stage's tensors from safetensors into a model built on the meta device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...core.errors import CheckpointError
from ..load.checkpoint import TensorFiles
from ..load.partition import LayerSpan
from .int8_linear import is_quantized, put_quantized

# Recomputed from the config; checkpoints of old exporters still carry it.
DERIVED = "rotary_emb.inv_freq"


def load_tensors(
    model: PreTrainedModel, span: LayerSpan, files: TensorFiles,
    dtype: torch.dtype, device: torch.device, *, int8: bool = False,
) -> None:  # fmt: skip
    """Fill the parameters that `span` needs; all others stay on the meta device.

    Tensor by tensor: the host never holds more than one beside what `device` holds. With `int8`
    the linear layers within the decoder layers become `Int8Linear`.
    Raises `CheckpointError` naming the tensor that is missing, unexpected, of another shape or
    corrupt.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_unexpected(model, parameters.keys(), files)
    source_of = {name: _source(name, model) for name in parameters if _belongs(name, model, span)}
    missing = sorted(set(source_of.values()) - files.names)
    if missing:
        raise CheckpointError(f"{files.folder}: tensor {missing[0]} is missing; fetch it again")
    loaded = {}
    for name, tensor in files.read(sorted(set(source_of.values()))):
        _check_tensor(name, tensor, parameters[name], files)
        placed = tensor.to(device, dtype)
        if int8 and is_quantized(model, name):
            put_quantized(model, name, placed)
        else:
            loaded[name] = nn.Parameter(placed, requires_grad=False)
    for name, source in source_of.items():
        if source not in loaded:
            continue
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, loaded[source])


def _belongs(name: str, model: PreTrainedModel, span: LayerSpan) -> bool:
    prefix = f"{model.base_model_prefix}."
    if name.startswith(f"{prefix}layers."):
        return span.first <= int(name.removeprefix(f"{prefix}layers.").split(".")[0]) < span.last
    if name.startswith(f"{prefix}embed_tokens."):
        return span.is_first
    return span.is_last


def _source(name: str, model: PreTrainedModel) -> str:
    """The checkpoint's name of a parameter: that of the embedding for a tied head."""
    tied = model.config.tie_word_embeddings and name == "lm_head.weight"
    return f"{model.base_model_prefix}.embed_tokens.weight" if tied else name


def _check_unexpected(model: PreTrainedModel, known: Iterable[str], files: TensorFiles) -> None:
    for name in sorted(files.names.difference(known)):
        if not name.endswith(DERIVED):
            raise CheckpointError(
                f"{files.folder}: tensor {name} is unexpected in a "
                f"{model.config.model_type} model; config and weights do not belong together"
            )


def _check_tensor(name: str, tensor: Tensor, wanted: Tensor, files: TensorFiles) -> None:
    if tensor.shape != wanted.shape:
        raise CheckpointError(
            f"{files.folder}: tensor {name} has shape {tuple(tensor.shape)}, the config says "
            f"{tuple(wanted.shape)}; config and weights do not belong together"
        )
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{files.folder}: tensor {name} is {tensor.dtype}; give an unquantised checkpoint"
        )
