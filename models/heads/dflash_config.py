"""The shape of a DFlash drafter, as its checkpoint has it.

Sizes come from the tensors. Other fields come from config.json: at its top in old files, in
`dflash_config` in newer ones, under other names in those of speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from .checkpoint_kind import Shapes
from .feature_head_config import rope_parameters

ATTENTION = "layers.0.self_attn."
OWN_FIELDS = "dflash_config"
# Known fields of `dflash_config`; any other field that is set could change the arithmetic.
KNOWN_FIELDS = {
    "block_size", "mask_token_id", "target_layer_ids", "target_hidden_size", "projector_type",
    "causal", "causal_head", "use_swa", "swa_window_size", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "sample_from_anchor",
}  # fmt: skip
# Default block size (z-lab/dflash).
BLOCK_SIZE = 16
SLIDING, FULL = "sliding_attention", "full_attention"


class RowView(NamedTuple):
    """What rows behind a text see in a layer, by distance.

    is_causal  nothing behind themselves
    window     fewer tokens back, or ahead, than that; 0: all
    """

    is_causal: bool
    window: int

    def sees(self, back: Tensor) -> Tensor:
        """bool for int64 distances: whether a row sees the token that many places before it (or
        after it)."""
        seen = back >= 0 if self.is_causal else torch.ones_like(back, dtype=torch.bool)
        if self.window:
            seen = seen & (back.abs() < self.window)
        return seen


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and switches of a DFlash drafter.

    block_size      rows of a block, the last committed token's among them
    mask_token      token whose embedding is the input of the other rows
    num_features    states of the target for each token, side by side, each `feature_size` wide
    feature_layers  decoder layers of the target whose outputs these are; empty: by its depth
    is_shifted      row i of a block predicts token i + 1 and not token i: one draft more
    causal_layers   layers whose rows see only the rows of the block before them; empty: none
    windows         of each layer, the number of tokens that a row sees, itself included; 0 or
                    empty: all
    embedding_scale, output_multiplier, logit_softcap  factors of the embeddings and the logits, and
                    the bound of the latter; 0: none
    draft_vocab_size  rows of its own output head; 0: the target's head
    rope            as `rope_parameters` of transformers
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token: int
    num_layers: int = 1
    num_features: int = 1
    feature_size: int = 0
    feature_layers: tuple[int, ...] = ()
    is_shifted: bool = False
    causal_layers: tuple[bool, ...] = ()
    windows: tuple[int, ...] = ()
    has_attention_bias: bool = False
    has_output_bias: bool = False
    has_query_norm: bool = True
    has_embedding: bool = False
    vocab_size: int = 0
    draft_vocab_size: int = 0
    has_token_map: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float = 0.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    @property
    def first_row(self) -> int:
        """Row of the block that predicts the first draft."""
        return 0 if self.is_shifted else 1

    @property
    def draft_length(self) -> int:
        """Drafts of a block."""
        return self.block_size - self.first_row

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs it reads.

        By default spread from the second to the third last; a single one is the middle layer.
        """
        if self.feature_layers:
            return self.feature_layers
        if self.num_features == 1:
            return (num_target_layers // 2,)
        step = (num_target_layers - 4) / (self.num_features - 1)
        return tuple(round(1 + index * step) for index in range(self.num_features))

    def view(self, layer: int) -> RowView:
        """What the rows of a block see in this layer."""
        is_causal = bool(self.causal_layers) and self.causal_layers[layer]
        return RowView(is_causal, self.windows[layer] if self.windows else 0)


def dflash_config(shapes: Shapes, config: Mapping[str, Any]) -> DFlashConfig:
    """The config of a checkpoint.

    Raises `CheckpointError` naming a tensor or a field that is missing or does not fit.
    """
    nested = config.get("transformer_layer_config") or {}
    config = {**nested, **{name: value for name, value in config.items() if value is not None}}
    own = _own_fields(config)
    width, query = _matrix(shapes, "fc.weight"), _matrix(shapes, ATTENTION + "q_proj.weight")
    norm = shapes.get(ATTENTION + "q_norm.weight")
    key = _matrix(shapes, ATTENTION + "k_proj.weight")[0]
    if norm is None or query[0] % norm[0] or key % norm[0]:
        raise CheckpointError(
            f"the DFlash drafter has queries of {query[0]}, keys of {key} and a query norm of "
            f"shape {norm}; its tensors do not fit each other"
        )
    indices = [name.split(".")[1] for name in shapes if name.startswith("layers.")]
    num_layers = 1 + max(int(index) for index in indices if index.isdecimal())
    return DFlashConfig(
        hidden_size=width[0],
        intermediate_size=_matrix(shapes, "layers.0.mlp.down_proj.weight")[1],
        num_heads=query[0] // norm[0],
        num_kv_heads=key // norm[0],
        head_dim=norm[0],
        num_layers=num_layers,
        has_attention_bias=ATTENTION + "q_proj.bias" in shapes,
        has_output_bias=ATTENTION + "o_proj.bias" in shapes,
        has_embedding="embed_tokens.weight" in shapes,
        vocab_size=shapes.get("embed_tokens.weight", (int(config.get("vocab_size", 0)),))[0],
        draft_vocab_size=shapes.get("lm_head.weight", (0,))[0],
        has_token_map="d2t" in shapes,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        output_multiplier=float(own.get("output_multiplier") or 1.0),
        logit_softcap=float(own.get("final_logit_softcapping") or 0.0),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        rope=rope_parameters(config),
        **_block_fields(config, own),
        **_feature_fields(config, own, width),
        **_attention_fields(config, own, num_layers),
    )


def published_fields(config: DFlashConfig) -> dict[str, object]:
    """The config.json fields of a drafter besides its sizes, as written by its project."""
    sliding = tuple(bool(window) for window in config.windows) or (False,) * config.num_layers
    causal = config.causal_layers or (False,) * config.num_layers
    return {
        "block_size": config.block_size,
        "layer_types": [SLIDING if one else FULL for one in sliding],
        "sliding_window": max(config.windows, default=0) or None,
        # By default, layers with windows are causal.
        "is_causal": None if causal == sliding else all(causal),
        OWN_FIELDS: {
            "mask_token_id": config.mask_token,
            "target_layer_ids": list(config.feature_layers),
            "target_hidden_size": config.feature_size,
            "sample_from_anchor": config.is_shifted,
            "input_embedding_scale": config.embedding_scale,
            "output_multiplier": config.output_multiplier,
            "final_logit_softcapping": config.logit_softcap or None,
        },
    }


def _own_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(config.get(OWN_FIELDS) or {})
    other = [name for name, value in own.items() if name not in KNOWN_FIELDS and value]
    if other:
        raise CheckpointError(
            f"the DFlash drafter's {OWN_FIELDS} sets {', '.join(sorted(other))}, which draftline "
            "does not know"
        )
    for name in KNOWN_FIELDS & config.keys():
        if name in own and own[name] != config[name]:
            raise CheckpointError(
                f"the DFlash drafter's config has {name} {config[name]!r} and, in {OWN_FIELDS}, "
                f"{own[name]!r}; keep the right one"
            )
        own[name] = config[name]
    return own


def _block_fields(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    is_shifted = bool(own.get("sample_from_anchor", False))
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafts = methods[0].get("speculative_tokens")
    default = BLOCK_SIZE if drafts is None else int(drafts) + (not is_shifted)
    block, mask = int(own.get("block_size") or default), own.get("mask_token_id")
    if mask is None or block < 2:
        raise CheckpointError(
            f"the DFlash drafter's config has a block of {block} and mask_token_id {mask}; both "
            "must be there, as it was trained with them"
        )
    if mask == config.get("eos_token_id") or not 0 <= mask < config.get("vocab_size", mask + 1):
        raise CheckpointError(
            f"the DFlash drafter's mask_token_id {mask} is no unused token of its vocabulary of "
            f"{config.get('vocab_size')}"
        )
    return {"block_size": block, "mask_token": int(mask), "is_shifted": is_shifted}


def _feature_fields(
    config: Mapping[str, Any], own: Mapping[str, Any], width: tuple[int, int]
) -> dict[str, Any]:
    """Published ids are of layers' outputs; those of speculators are of the next layers."""
    layers = tuple(int(index) for index in own.get("target_layer_ids") or ())
    inputs = config.get("aux_hidden_state_layer_ids")
    if not layers and inputs:
        layers = tuple(int(index) - 1 for index in inputs)
    size = int(own.get("target_hidden_size") or width[0])
    if width[1] % size or (layers and len(layers) != width[1] // size):
        raise CheckpointError(
            f"the DFlash drafter's fc reads {width[1]} numbers, which are not {len(layers)} "
            f"features of {size} (layers {layers})"
        )
    return {"num_features": width[1] // size, "feature_size": size, "feature_layers": layers}


def _attention_fields(
    config: Mapping[str, Any], own: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """The mask of each layer, from the first field that defines it."""
    kinds = config.get("layer_types")
    window = int(config.get("sliding_window") or 0)
    is_causal = config.get("is_causal", own.get("causal", own.get("causal_head")))
    if not kinds:
        is_sliding = bool(own.get("use_swa"))
        kinds = [SLIDING if is_sliding else FULL] * num_layers
        window = int(own.get("swa_window_size") or window)
        is_causal = bool(is_causal)
    is_sliding = [kind == SLIDING for kind in kinds]
    if len(kinds) != num_layers or (any(is_sliding) and not window):
        raise CheckpointError(
            f"the DFlash drafter's config has layer_types {kinds} and sliding_window {window}, its "
            f"tensors are of {num_layers} layers"
        )
    if config.get("sliding_window_non_causal"):
        is_causal = bool(is_causal)
    causal = tuple(one if is_causal is None else bool(is_causal) for one in is_sliding)
    return {
        "causal_layers": causal if any(causal) else (),
        "windows": tuple(window * one for one in is_sliding) if any(is_sliding) else (),
    }


def _matrix(shapes: Shapes, name: str) -> tuple[int, int]:
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise CheckpointError(
            f"the DFlash drafter's checkpoint has no matrix {name}; fetch it again"
        )
    return shape[0], shape[1]
