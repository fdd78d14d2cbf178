"""What a head's config.json leaves open: fields that projects read in different ways.

Only what is drafted tells which reading is right; a wrong one raises no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint_kind import CheckpointKind, Shapes

# Fields to set in config.json, which then tells.
Reading = Mapping[str, Any]
DECLARED: tuple[Reading, ...] = ({},)

SHIFTED, RESIDUAL, NORM_OUTPUT = "sample_from_anchor", "norm_before_residual", "norm_output"


def possible_readings(
    kind: CheckpointKind, shapes: Shapes, config: Mapping[str, Any]
) -> tuple[Reading, ...]:
    """What a config may mean, the likeliest first; an empty one alone where it leaves nothing open.

    Whether rows of a DSpark block say the next token is told by newer files of speculators, older
    ones fill in. Where these do not say `norm_before_residual` of EAGLE-3, vLLM takes it for true
    and speculators for false. `norm_output` of other files is EAGLE-3.1's, whose drafts go on from
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
    # Norms of each feature are EAGLE-3.1's alone.
    is_open = kind is CheckpointKind.EAGLE3 and "fc_norm.0.weight" not in shapes
    if is_open and not is_speculators and config.get(NORM_OUTPUT):
        return {NORM_OUTPUT: True}, {NORM_OUTPUT: False}
    return DECLARED


def reading_text(reading: Reading) -> str:
    """A reading as a log says it."""
    return ",".join(f"{name}={str(value).lower()}" for name, value in reading.items())


def _is_said(name: str, *parts: Mapping[str, Any]) -> bool:
    return any(part.get(name) is not None for part in parts)
