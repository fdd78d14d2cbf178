"""The models that draftline's stages support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ...core.errors import CheckpointError, UnsupportedModel
from .checkpoint import composite_type

# Models whose forward is embed, layers, norm, head: their layers run one after the other, by
# draftline's own modules and kernels where these know them. Others run by transformers' forward.
LAYER_BY_LAYER = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})


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
