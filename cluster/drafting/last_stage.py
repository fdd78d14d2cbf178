"""Heads that draft in the target's last stage, as its process loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...core.proposals import FeatureLayers
from ...models.load.model_info import ModelInfo
from ..config import EngineConfig
from .drafter_options import drafter_options
from .head_features import ACTOR, HEAD_KEYS, PLACEMENT, head_folder, is_in_last_stage

if TYPE_CHECKING:
    from ...drafters.heads.last_stage import LastStageHeadSpec


def last_stage_heads(
    config: EngineConfig, target: ModelInfo, layers: Sequence[int]
) -> tuple[LastStageHeadSpec, ...]:
    """The heads of the last stage, which hands out states of `layers`.

    Raises `CheckpointError`; `ConfigError` that names the drafter and the key.
    """
    heads = []
    for index, drafter in enumerate(config.told_drafters):
        try:
            if not is_in_last_stage(drafter):
                continue
            # As other drafters' code that needs torch.
            from ...drafters.heads.last_stage import LastStageHeadSpec  # noqa: PLC0415
            from ...drafters.heads.options import HeadOptions  # noqa: PLC0415

            options = drafter_options(drafter, HeadOptions, HEAD_KEYS)
            for key in ("device", "dtype"):
                if getattr(options, key) != "auto":
                    raise ConfigError(
                        key, f"is the last stage's; leave it out, or set {PLACEMENT}: {ACTOR}"
                    )
            given = FeatureLayers(tuple(layers), target.hidden_size)
            folder = head_folder(drafter)
        except ConfigError as error:
            raise ConfigError(f"drafters[{index}].{error.field}", error.message) from error
        heads.append(
            LastStageHeadSpec(drafter.source, folder, target, given, options, drafter.max_nodes)
        )
    return tuple(heads)
