"""Ambiguities of a head's config.json: fields that projects interpret in different ways.

Only the accepted length shows which reading is right; a wrong one raises no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint_kind import CheckpointKind, Shapes

# Fields that make config.json unambiguous.
Reading = Mapping[str, Any]
DECLARED: tuple[Reading, ...] = ({},)

SHIFTED, RESIDUAL, NORM_OUTPUT = "sample_from_anchor", "norm_before_residual", "norm_output"


def possible_readings(
    kind: CheckpointKind, shapes: Shapes, config: Mapping[str, Any]
) -> tuple[Reading, ...]:
    """The possible readings of a config, the likeliest first; a single empty one if it is
    unambiguous.

    Newer files of speculators state whether rows of a DSpark block predict the next token; in older
    ones rows predict their own. If `norm_before_residual` of EAGLE-3 is missing, vLLM assumes true
    and speculators false. `norm_output` of other files is EAGLE-3.1's, whose drafts continue from
    normed states, or SpecForge's, whose do not.
    """
    is_speculators = config.get("speculators_model_type") is not None
    nested = config.get("transformer_layer_config") or {}
    if kind is CheckpointKind.DSPARK and is_speculators:
        own = config.get("dflash_config") or {}
        if not _is_said(SHIFTED, config, own):
            return {SHIFTED: True}, {SHIFTED: False}
    reads_pairs = kind in {CheckpointKind.EAGLE3, CheckpointKind.P_EAGLE}
    if reads_pairs and is_speculators and not _is_said(RESIDUAL, config, nested):
        return {RESIDUAL: True}, {RESIDUAL: False}
    # Only EAGLE-3.1 norms each feature.
    is_open = kind is CheckpointKind.EAGLE3 and "fc_norm.0.weight" not in shapes
    if is_open and not is_speculators and config.get(NORM_OUTPUT):
        return {NORM_OUTPUT: True}, {NORM_OUTPUT: False}
    return DECLARED


def reading_text(reading: Reading) -> str:
    """A reading as text for logs."""
    return ",".join(f"{name}={str(value).lower()}" for name, value in reading.items())


def _is_said(name: str, *parts: Mapping[str, Any]) -> bool:
    return any(part.get(name) is not None for part in parts)
