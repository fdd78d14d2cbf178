"""How a feature head combines the embedding of a token and the previous feature.

Each takes the embedding of token i + 1 and the feature of token i, and returns a state, all [...,
hidden_size]. Tensors have the published names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .formats.feature_head_config import FeatureHeadConfig


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
        self.fc = LinearFusion(config)
        self.mlp = nn.ModuleDict(
            {
                "input_layernorm": nn.RMSNorm(hidden, eps=eps),
                "up_proj": nn.Linear(2 * hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The state of each token."""
        state = self.fc.fuse(embeddings, features)
        norm = self.mlp["input_layernorm"]
        both = torch.cat([norm(self.post_attention_layernorm(state)), norm(embeddings)], dim=-1)
        return state + self.mlp["down_proj"](functional.silu(self.mlp["up_proj"](both)))
