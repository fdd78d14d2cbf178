"""The models that draftline's stages support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ...core.errors import CheckpointError
from .checkpoint import composite_type

# Models whose forward is: embed, layers, norm, head. Each is tested against transformers; others
# may scale or add something between the parts, which calling the layers alone would lose.
SUPPORTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})


def check_supported(config: PretrainedConfig, folder: Path) -> None:
    """Raise `CheckpointError` naming the kind unless stages run the model of this config."""
    if config.model_type not in SUPPORTED:
        whole = composite_type(folder, config)
        kind = f"{config.model_type!r}" if whole is None else f"{whole!r}"
        part = "" if whole is None else f" (its text part is {config.model_type!r})"
        raise CheckpointError(
            f"{folder}: model_type {kind}{part} is not supported; "
            f"supported are {', '.join(sorted(SUPPORTED))}"
        )
    for rope_type in _rope_types(config):
        # These scale by the longest sequence of the batch, so a text would depend on the batch.
        if rope_type in ("dynamic", "longrope"):
            raise CheckpointError(f"{folder}: rope_type {rope_type!r} is not supported")


def _rope_types(config: Any) -> set[str | None]:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {kind.get("rope_type") for kind in kinds}
