"""Detects the kind of drafter in a checkpoint by its config and its tensors' names and shapes.

The published projects name their kinds in different ways or not at all, so the tensors decide. Some
fields of a config.json are interpreted in different ways: only the accepted length shows which
reading is right, and a wrong one raises no error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from ...core.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

# Medusa's heads: `0.0.linear.weight`, TensorRT-LLM's `medusa_heads.0.medusa_layers...`, or vLLM's
# `blocks.0.layers...`.
MEDUSA_NAME = re.compile(
    r"\d+\.(?:medusa_layers\.)?\d+\.linear\.weight$|^blocks\.\d+\.layers\.\d+\."
)
# Tensors that a message about an unknown checkpoint names.
SHOWN = 6


class CheckpointKind(StrEnum):
    """A kind of drafter.

    `EAGLE` is the one network of EAGLE-1, EAGLE-2 and HASS, whose trees and training differ.
    """

    EAGLE = "eagle"
    FSPAD = "fspad"
    GRIFFIN = "griffin"
    EAGLE3 = "eagle3"
    P_EAGLE = "p_eagle"
    SPECFORMER = "specformer"
    MEDUSA = "medusa"
    DFLASH = "dflash"
    DFLASH2 = "dflash2"
    DOMINO = "domino"
    DSPARK = "dspark"
    MTP = "mtp"
    CAUSAL_LM = "causal_lm"


# Values of speculators' `speculators_model_type`.
DECLARED = {
    "eagle3": CheckpointKind.EAGLE3,
    "peagle": CheckpointKind.P_EAGLE,
    "dflash": CheckpointKind.DFLASH,
    "dflash2": CheckpointKind.DFLASH2,
    "dspark": CheckpointKind.DSPARK,
    "mtp": CheckpointKind.MTP,
}


def checkpoint_kind(shapes: Shapes, config: Mapping[str, Any]) -> CheckpointKind:
    """The kind of a checkpoint.

    shapes  of its tensors by name, without the prefixes of wrappers (`HeadTensors.shapes`)
    config  its config.json

    Raises `CheckpointError` naming some of its tensors if no kind fits.
    """
    declared = config.get("speculators_model_type")
    if declared is not None:
        if declared not in DECLARED:
            raise CheckpointError(f"a checkpoint of speculators_model_type {declared!r} is unknown")
        return DECLARED[declared]
    for kind, fits in RULES:
        if fits(shapes, config):
            return kind
    some = ", ".join(sorted(shapes)[:SHOWN])
    raise CheckpointError(
        f"the checkpoint is of no known kind of drafter (its tensors begin with {some}); "
        f"known are {', '.join(CheckpointKind)}"
    )


def _has(*parts: str) -> Callable[[Shapes, Mapping[str, Any]], bool]:
    """Whether each part is in the name of some tensor."""

    def fits(shapes: Shapes, _config: Mapping[str, Any]) -> bool:
        return all(any(part in name for name in shapes) for part in parts)

    return fits


def _architecture(config: Mapping[str, Any], ending: str) -> bool:
    return any(str(name).endswith(ending) for name in config.get("architectures") or ())


def _is_dflash2(shapes: Shapes, config: Mapping[str, Any]) -> bool:
    own = _has("candidate_selector."), _has("_conv.base_kernel")
    is_named = _architecture(config, "DFlash2DraftModel")
    return is_named or any(fits(shapes, config) for fits in own)


def _is_domino(shapes: Shapes, config: Mapping[str, Any]) -> bool:
    options = {**config, **(config.get("dflash_config") or {})}
    return _has("prefix_gru.")(shapes, config) or options.get("projector_type") == "domino"


def _is_dspark(shapes: Shapes, config: Mapping[str, Any]) -> bool:
    own = _has("markov_head.markov_w1.weight")(shapes, config)
    in_target = any(name.startswith("dspark_") for name in config)
    return own or _architecture(config, "DSparkModel") or in_target


def _is_p_eagle(shapes: Shapes, config: Mapping[str, Any]) -> bool:
    if "mask_hidden" in shapes:
        return True
    is_parallel = bool(config.get("parallel_drafting"))
    is_parallel = is_parallel or "ptd_token_id" in config or "pard_token" in config
    return is_parallel and _reads_pairs(shapes, config)


def _is_dflash(shapes: Shapes, config: Mapping[str, Any]) -> bool:
    """Features enter as keys and values of every layer, whose queries are d wide."""
    if "encoder.fc.weight" in shapes or _has("aux_hidden_norms.")(shapes, config):
        return True
    if not {"hidden_norm.weight", "fc.weight"} <= shapes.keys():
        return False
    query = shapes.get("layers.0.self_attn.q_proj.weight")
    return query is None or query[1] == shapes["fc.weight"][0]


def _reads_pairs(shapes: Shapes, _config: Mapping[str, Any]) -> bool:
    """Queries of the first layer read the embedding beside the hidden state."""
    query = shapes.get("layers.0.self_attn.q_proj.weight")
    output = shapes.get("layers.0.self_attn.o_proj.weight")
    if query is None or output is None or query[1] != 2 * output[0]:
        return False
    return "layers.0.hidden_norm.weight" in shapes or "d2t" in shapes


def _is_fspad(shapes: Shapes, _config: Mapping[str, Any]) -> bool:
    if "fc.mlp.gate_proj.weight" in shapes:
        return True
    fused, output = shapes.get("fc.weight"), shapes.get("layers.0.mlp.down_proj.weight")
    return fused is not None and output is not None and output[0] == 2 * fused[0]


def _is_eagle(shapes: Shapes, _config: Mapping[str, Any]) -> bool:
    fused = shapes.get("fc.weight")
    return fused is not None and len(fused) == 2 and fused[1] == 2 * fused[0]


def _is_medusa(shapes: Shapes, _config: Mapping[str, Any]) -> bool:
    return any(MEDUSA_NAME.search(name) for name in shapes)


def _is_causal_lm(shapes: Shapes, config: Mapping[str, Any]) -> bool:
    return "embed_tokens.weight" in shapes and int(config.get("num_hidden_layers") or 0) > 0


# The first match counts; kinds with a similar body come before the more general one.
RULES: tuple[tuple[CheckpointKind, Callable[[Shapes, Mapping[str, Any]], bool]], ...] = (
    (CheckpointKind.DFLASH2, _is_dflash2),
    (CheckpointKind.DOMINO, _is_domino),
    (CheckpointKind.DSPARK, _is_dspark),
    (CheckpointKind.P_EAGLE, _is_p_eagle),
    (CheckpointKind.DFLASH, _is_dflash),
    (CheckpointKind.EAGLE3, _reads_pairs),
    (CheckpointKind.GRIFFIN, _has("fc.mlp.input_layernorm.weight")),
    (CheckpointKind.FSPAD, _is_fspad),
    (CheckpointKind.EAGLE, _is_eagle),
    (CheckpointKind.SPECFORMER, _has("down_samp.weight", "positional.weight")),
    (CheckpointKind.MEDUSA, _is_medusa),
    (CheckpointKind.CAUSAL_LM, _is_causal_lm),
)


# Fields that make config.json unambiguous.
Reading = Mapping[str, Any]

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
        if not _is_given(SHIFTED, config, own):
            return {SHIFTED: True}, {SHIFTED: False}
    reads_pairs = kind in {CheckpointKind.EAGLE3, CheckpointKind.P_EAGLE}
    if reads_pairs and is_speculators and not _is_given(RESIDUAL, config, nested):
        return {RESIDUAL: True}, {RESIDUAL: False}
    # Only EAGLE-3.1 norms each feature.
    is_open = kind is CheckpointKind.EAGLE3 and "fc_norm.0.weight" not in shapes
    if is_open and not is_speculators and config.get(NORM_OUTPUT):
        return {NORM_OUTPUT: True}, {NORM_OUTPUT: False}
    return ({},)


def reading_text(reading: Reading) -> str:
    """A reading as text for logs."""
    return ",".join(f"{name}={str(value).lower()}" for name, value in reading.items())


def _is_given(name: str, *parts: Mapping[str, Any]) -> bool:
    return any(part.get(name) is not None for part in parts)
