"""`draftline train export`: an EAGLE-3 head for other servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ....core.errors import ConfigError
from ....models.heads.feature_head import FeatureHead
from ....models.heads.feature_head_config import default_layers
from ....models.heads.load_head import (
    has_target_rows,
    load_head,
    load_shared_parts,
    misfits,
    take_target_rows,
)
from ....models.load.checkpoint import read_json, resolve_head_path
from ....models.load.model_info import read_model_info
from ....training.heads.export import RECORD, export_head
from .recipes import RECIPES


def export_published(name: str, model: str, output: Path) -> None:
    """Write a head in the published form.

    vLLM takes the first rows of the target's output head for those that a checkpoint has not, and
    then no draft is right.

    Raises `CheckpointError`, and `ConfigError` for a head of another kind or target.
    """
    folder, target = resolve_head_path(name), read_model_info(model)
    head = load_head(folder)
    if not isinstance(head, FeatureHead) or head.config.fusion != "pair":
        raise ConfigError("head", f"{name} is no EAGLE-3 head")
    if problems := misfits(head.config, target):
        raise ConfigError("head", f"{name} does not fit {model}: {'; '.join(problems)}")
    if has_target_rows(head.config):
        take_target_rows(head, load_shared_parts(target, "float32", "cpu").head)
    is_default = head.config.layers_of(target.num_layers) == default_layers(target.num_layers)
    head.config = replace(
        head.config,
        has_target_rows=False,
        feature_layers=() if is_default else head.config.feature_layers,
    )
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    export_head(head, output, {"architectures": [RECIPES["eagle3"].architecture]}, record)
