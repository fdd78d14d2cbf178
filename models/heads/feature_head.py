"""Feature heads: small decoders that continue from the target's hidden states.

One network whose switches give EAGLE-1, EAGLE-2 and HASS (one set of weights, trained apart),
FSPAD, GRIFFIN, and EAGLE-3 and 3.1. Row i pairs the feature of token i with the embedding of token
i + 1, stands at position i, and predicts token i + 2. Tensors have the published names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .feature_head_config import FeatureHeadConfig
from .head_layer import Attend, HeadLayer, HeadRotation


class LinearFusion(nn.Linear):
    """One product of both, the embedding first (EAGLE-1, arXiv 2401.15077)."""

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__(2 * config.hidden_size, config.hidden_size, bias=config.has_fusion_bias)

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The state of each token."""
        return self(torch.cat([embeddings, features], dim=-1))


class SampledFusion(nn.Module):
    """A gated correction of the linear fusion: the gate from the embedding, the value from the
    fused state ("feature sampling", FSPAD, arXiv 2408.15562).
    """

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.fusion_size
        self.fc = LinearFusion(config)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The state of each token."""
        state = self.fc.fuse(embeddings, features)
        gate = functional.silu(self.mlp["gate_proj"](embeddings))
        value = self.mlp["up_proj"](self.post_attention_layernorm(state))
        return state + self.mlp["down_proj"](gate * value)


class GuidedFusion(nn.Module):
    """A correction of the linear fusion from it and the embedding once more ("token-guided fusion",
    GRIFFIN, arXiv 2502.11018).

    One norm serves both halves of its second product.
    """

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.fusion_size, config.rms_norm_eps
        has_bias = config.has_paper_fusion
        norm = nn.LayerNorm if config.has_paper_fusion else nn.RMSNorm
        self.fc = LinearFusion(config)
        self.mlp = nn.ModuleDict(
            {
                "input_layernorm": norm(hidden, eps=eps),
                "up_proj": nn.Linear(2 * hidden, inner, bias=has_bias),
                "down_proj": nn.Linear(inner, hidden, bias=has_bias),
            }
        )
        self.post_attention_layernorm = norm(hidden, eps=eps)

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The state of each token."""
        state = self.fc.fuse(embeddings, features)
        norm = self.mlp["input_layernorm"]
        both = torch.cat([norm(self.post_attention_layernorm(state)), norm(embeddings)], dim=-1)
        return state + self.mlp["down_proj"](functional.silu(self.mlp["up_proj"](both)))


FUSION_MODULES = {"linear": LinearFusion, "sampled": SampledFusion, "guided": GuidedFusion}


@dataclass(frozen=True, slots=True, eq=False)
class HeadOutput:
    """A head's outputs for each row, both [..., rows, hidden_size].

    predict  the input of the output head, whose logits predict the token after the next
    regress  replaces the target's feature for drafts that continue from this row; the same tensor
             if the head has one feature. `predict` must not be fed back (FSPAD, GRIFFIN)
    """

    predict: Tensor
    regress: Tensor


class FeatureHead(nn.Module):
    """A head; its tensors have the published names, so that checkpoints are its state dict."""

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.fusion != "pair":
            self.fc = FUSION_MODULES[config.fusion](config)
        elif config.has_fusion:
            self.fc = nn.Linear(config.num_features * config.feature_size, hidden, bias=False)
        self.layers = nn.ModuleList(HeadLayer(config, index) for index in range(config.num_layers))
        self.rotation = HeadRotation(config.head_dim, config.max_positions, config.rope)
        if config.fusion == "pair":
            self.norm = nn.RMSNorm(hidden, eps=eps)
            self._add_feature_norms()
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.has_token_map:
            # Offsets: draft token j is token j + d2t[j] of the target.
            self.d2t = nn.Buffer(torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def project(self, features: Tensor) -> Tensor:
        """The target's features as `forward` takes them; the head's own features need no
        projection.

        [..., rows, hidden_size] of [..., rows, num_features * feature_size].
        """
        config = self.config
        if config.fusion != "pair" or not config.has_fusion:
            return features
        if config.norm_features == "all":
            features = self.input_norm(features)
        elif config.norm_features == "each":
            parts = features.split(config.feature_size, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> HeadOutput:
        """The head's outputs for rows, whose attention `attend` computes.

        embeddings  [..., rows, hidden_size] of the tokens after the features' own
        features    [..., rows, hidden_size] of `project`, or `regress` of earlier rows
        positions   int64 [..., rows]  of the features
        """
        rotation = self.rotation(embeddings, positions)
        is_pair = self.config.fusion == "pair"
        states = features if is_pair else self.fuse(embeddings, features)
        for layer in self.layers:
            states = layer(states, embeddings, rotation, attend)
        if is_pair:
            normed = self.norm(states)
            return HeadOutput(normed, normed if self.config.norm_output else states)
        if self.config.splits_output:
            predict, regress = states.chunk(2, dim=-1)
            return HeadOutput(predict, regress)
        return HeadOutput(states, states)

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """[..., rows, hidden_size]: the input of the first layer of a head that reads no pairs."""
        assert isinstance(self.fc, LinearFusion | SampledFusion | GuidedFusion)
        return self.fc.fuse(embeddings, features)

    def keys_values(
        self, embeddings: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [..., rows, kv_heads, head_dim] of rows in the first layer."""
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        is_pair = self.config.fusion == "pair"
        states = features if is_pair else self.fuse(embeddings, features)
        rotation = self.rotation(embeddings, positions)
        return layer.self_attn.keys_values(layer.inputs(states, embeddings), rotation)

    def target_tokens(self, tokens: Tensor) -> Tensor:
        """Token ids of the target, of the head's own output."""
        return tokens + self.d2t[tokens] if self.config.has_token_map else tokens

    def _add_feature_norms(self) -> None:
        config = self.config
        if config.norm_features == "all":
            width = config.num_features * config.feature_size
            self.input_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        elif config.norm_features == "each":
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.feature_size, eps=config.rms_norm_eps)
                for _ in range(config.num_features)
            )
