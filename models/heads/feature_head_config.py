"""The shape of a feature head, as its checkpoint has it.

Sizes come from the tensors, and only other fields from the config. A draft model's config often
repeats the target's fields, or unused fields of a base class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import LlamaConfig

from ...core.errors import CheckpointError
from .checkpoint_kind import CheckpointKind, Shapes

Fusion = Literal["linear", "sampled", "guided", "pair"]
FUSIONS: dict[CheckpointKind, Fusion] = {
    CheckpointKind.EAGLE: "linear",
    CheckpointKind.FSPAD: "sampled",
    CheckpointKind.GRIFFIN: "guided",
    CheckpointKind.EAGLE3: "pair",
}
ATTENTION = "layers.0.self_attn."


@dataclass(frozen=True, slots=True)
class FeatureHeadConfig:
    """Switches and sizes of a feature head.

    fusion           how a token's embedding is combined with the previous feature: `linear`
                     (EAGLE-1, 2, HASS), `sampled` (FSPAD), `guided` (GRIFFIN), or `pair`, side by
                     side through the first layer's attention (EAGLE-3)
    fusion_size      inner width of the fusion, where it has one
    has_paper_fusion  `guided` with layer norms and biases, as GRIFFIN's paper writes it; its
                     released code has RMS norms, and a bias of its first product alone
    splits_output    the last layer gives two features, one for prediction and one for further
                     drafts
    feature_size     width of a feature of the target
    num_features     features of the target for each token, side by side
    feature_layers   decoder layers of the target whose outputs these are; -1: the embeddings.
                     Empty: by the target's depth for `pair`, else the last state, normed
    norm_before_residual, norm_output  of EAGLE-3, as its config has them
    norm_features    of EAGLE-3: `all` features together, `each` by itself, or none, before `fc`
    draft_vocab_size tokens that it can draft, rows of its own output head; 0: the target's head
    has_target_rows  these rows are the target's, and stand in no checkpoint (FR-Spec, arXiv
                     2502.14856)
    rope             as `rope_parameters` of transformers
    """

    fusion: Fusion
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    fusion_size: int = 0
    num_layers: int = 1
    splits_output: bool = False
    has_fusion: bool = True
    has_fusion_bias: bool = False
    has_paper_fusion: bool = False
    has_attention_bias: bool = False
    has_query_norm: bool = False
    has_embedding: bool = False
    feature_size: int = 0
    num_features: int = 1
    feature_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_features: Literal["", "all", "each"] = ""
    draft_vocab_size: int = 0
    has_target_rows: bool = False
    has_token_map: bool = False
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs it reads; empty: the normed last state."""
        if self.feature_layers or self.fusion != "pair" or not self.has_fusion:
            return self.feature_layers
        return default_layers(num_target_layers)


def default_layers(num_target_layers: int) -> tuple[int, int, int]:
    """Layers whose outputs an EAGLE-3 head reads if its config names none.

    They are the inputs of layers 2, L // 2 and L - 3.
    """
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


def feature_head_config(
    kind: CheckpointKind, shapes: Shapes, config: Mapping[str, Any]
) -> FeatureHeadConfig:
    """The config of a checkpoint of one of `FUSIONS`.

    Raises `CheckpointError` naming a tensor that is missing or does not fit the others.
    """
    nested = config.get("transformer_layer_config") or {}
    config = {**nested, **{name: value for name, value in config.items() if value is not None}}
    hidden_size, query_size = _shape(shapes, ATTENTION + "o_proj.weight")
    head_dim = _head_dim(shapes, config, query_size)
    key_size = _shape(shapes, ATTENTION + "k_proj.weight")[0]
    output = _shape(shapes, "layers.0.mlp.down_proj.weight")
    if key_size % head_dim or output[0] not in {hidden_size, 2 * hidden_size}:
        raise CheckpointError(
            f"the drafter's layer has heads of {head_dim}, keys of {key_size} and outputs of "
            f"{output[0]} beside a hidden size of {hidden_size}; its config and tensors disagree"
        )
    return FeatureHeadConfig(
        fusion=_fusion(kind, shapes),
        hidden_size=hidden_size,
        intermediate_size=output[1],
        num_heads=query_size // head_dim,
        num_kv_heads=key_size // head_dim,
        head_dim=head_dim,
        vocab_size=shapes.get("embed_tokens.weight", (int(config.get("vocab_size", 0)),))[0],
        fusion_size=shapes.get("fc.mlp.down_proj.weight", (0, 0))[1],
        num_layers=_num_layers(shapes),
        splits_output=output[0] == 2 * hidden_size,
        has_fusion="fc.weight" in shapes or "fc.fc.weight" in shapes,
        has_fusion_bias="fc.bias" in shapes or "fc.fc.bias" in shapes,
        has_paper_fusion="fc.mlp.up_proj.bias" in shapes,
        has_attention_bias=ATTENTION + "q_proj.bias" in shapes,
        has_query_norm=ATTENTION + "q_norm.weight" in shapes,
        has_embedding="embed_tokens.weight" in shapes,
        draft_vocab_size=shapes.get("lm_head.weight", shapes.get("d2t", (0,)))[0],
        has_target_rows="d2t" in shapes and "lm_head.weight" not in shapes,
        has_token_map="d2t" in shapes,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        rope=rope_parameters(config),
        **_feature_fields(kind, shapes, config, hidden_size),
    )


def published_pair_fields(config: FeatureHeadConfig) -> dict[str, object]:
    """The config.json fields of an EAGLE-3 head besides its sizes.

    vLLM and SGLang build a Llama layer from them. Ids are written for other layers than the default
    ones alone: they name layers' inputs in vLLM, and outputs in SGLang.
    """
    own: dict[str, object] = {"use_aux_hidden_state": config.has_fusion}
    if config.feature_layers:
        own["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config.feature_layers]
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.feature_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_features == "all",
        "fc_norm": config.norm_features == "each",
        "norm_output": config.norm_output,
        "eagle_config": own,
    }


def _fusion(kind: CheckpointKind, shapes: Shapes) -> Fusion:
    """Other heads may have FSPAD's two features without its fusion."""
    is_plain = kind is CheckpointKind.FSPAD and "fc.mlp.gate_proj.weight" not in shapes
    return "linear" if is_plain else FUSIONS[kind]


def _num_layers(shapes: Shapes) -> int:
    indices = (name.split(".")[1] for name in shapes if name.startswith("layers."))
    return 1 + max(int(index) for index in indices if index.isdecimal())


def _shape(shapes: Shapes, name: str) -> tuple[int, int]:
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise CheckpointError(f"the drafter's checkpoint has no matrix {name}; fetch it again")
    return shape[0], shape[1]


def _head_dim(shapes: Shapes, config: Mapping[str, Any], query_size: int) -> int:
    """From the query norm, else from the config; never from the hidden size, which may be
    unrelated."""
    norm = shapes.get(ATTENTION + "q_norm.weight")
    if norm is not None:
        return norm[0]
    if config.get("head_dim"):
        return int(config["head_dim"])
    num_heads = int(config.get("num_attention_heads") or 0)
    if not num_heads or query_size % num_heads:
        raise CheckpointError(
            f"the drafter's config has num_attention_heads {num_heads}, which does not divide its "
            f"queries of {query_size}; set head_dim"
        )
    return query_size // num_heads


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' rope parameters, from a config.json of any version."""
    names = (
        "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "head_dim",
        "hidden_size", "num_attention_heads",
    )  # fmt: skip
    fields = {name: config[name] for name in names if config.get(name) is not None}
    rope = LlamaConfig.from_dict(fields).rope_parameters
    return dict(rope or {"rope_type": "default", "rope_theta": 10000.0})


def _feature_fields(
    kind: CheckpointKind, shapes: Shapes, config: Mapping[str, Any], hidden_size: int
) -> dict[str, Any]:
    """The features of the target that a head reads, and EAGLE-3's norms of them."""
    if kind is not CheckpointKind.EAGLE3:
        return {"feature_size": hidden_size}
    own = config.get("eagle_config") or {}
    inputs = own.get("eagle_aux_hidden_state_layer_ids") or config.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    width = shapes["fc.weight"][1] if "fc.weight" in shapes else hidden_size
    size = int(config.get("target_hidden_size") or hidden_size)
    count = len(inputs) if inputs else width // size
    if width != size * count:
        raise CheckpointError(
            f"the drafter's fc reads {width} numbers, which are not {count} features of {size}; "
            "set target_hidden_size to the target's hidden size"
        )
    # As in vLLM: files of speculators norm before the residual by default.
    is_speculators = config.get("speculators_model_type") is not None
    norm_features = "all" if "input_norm.weight" in shapes else ""
    return {
        "feature_size": size,
        "num_features": count,
        # Published ids name the layers whose inputs these states are.
        "feature_layers": tuple(int(index) - 1 for index in inputs or ()),
        "norm_before_residual": bool(config.get("norm_before_residual", is_speculators)),
        "norm_output": bool(config.get("norm_output", False)),
        "norm_features": "each" if "fc_norm.0.weight" in shapes else norm_features,
    }
