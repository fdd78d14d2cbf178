"""Which of the target's states the engine's heads read, told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import ConfigError
from ...models.load.bundled import BUNDLED_HEADS
from ...models.load.checkpoint import resolve_head_path
from ...models.load.model_info import ModelInfo
from ..config import HEAD, DrafterConfig, EngineConfig


def feature_layers_of(config: EngineConfig, target: ModelInfo) -> tuple[int, ...]:
    """Layers of the target whose outputs stages hand out, ascending; those of all heads together.

    Raises `CheckpointError`; `ConfigError` (`model`) for a head that does not fit the target,
    (`transport`) for one of another process.
    """
    heads = [drafter for drafter in config.drafters if drafter.kind == HEAD]
    if any(head.transport == "grpc" for head in heads):
        raise ConfigError(
            "transport",
            "of a head must be inproc: it reads the target's states, which are not sent to other "
            "processes",
        )
    return tuple(sorted({layer for head in heads for layer in layers_of_head(head, target)}))


def layers_of_head(config: DrafterConfig, target: ModelInfo) -> tuple[int, ...]:
    """Layers that one head reads, in its order. Raises as `feature_layers_of`."""
    # As other drafters' code that needs torch.
    from ...drafters.heads.drafter import feature_layers  # noqa: PLC0415

    return feature_layers(head_folder(config), target)


def head_folder(config: DrafterConfig) -> Path:
    """The folder of a head. Raises `ConfigError` (`model`), `CheckpointError`."""
    folder = config.options.get("model")
    if not isinstance(folder, str) or not folder:
        raise ConfigError(
            "model",
            f"must be given: a trained head's folder or hub id, or {', '.join(BUNDLED_HEADS)}",
        )
    return resolve_head_path(folder)
