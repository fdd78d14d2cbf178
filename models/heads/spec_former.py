"""SpecFormer: all drafts of a step in one pass, from states of several layers of the target.

The context enters by one causal attention, whose keys and values are cached like those of another
layer of the target. Then each row has a state for each of its drafts, which attend to each other
bidirectionally (arXiv 2511.20340, AAAI-26). Row i reads the states of token i and drafts tokens i +
2 onwards: the next token is the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import CheckpointError
from ...kernels.dispatch import Machine, load_normed_linear, runs_triton
from .checkpoint_kind import Shapes
from .feature_head_config import rope_parameters
from .head_layer import Attend, HeadRotation


@dataclass(frozen=True, slots=True)
class SpecFormerConfig:
    """Sizes of a SpecFormer.

    draft_length        drafts of a step
    feature_layers      decoder layers of the target whose outputs it reads; -1: the embeddings
    is_bidirectional    drafts also see later ones; in the paper's ablation and public code each
                        sees only earlier ones
    rope                as `rope_parameters` of transformers; of the context's attention alone
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_length: int
    feature_layers: tuple[int, ...] = ()
    is_bidirectional: bool = True
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    @property
    def num_features(self) -> int:
        """States of the target for each token."""
        return 4

    @property
    def feature_size(self) -> int:
        """Width of each."""
        return self.hidden_size

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs it reads; the last one's are normed.

        By default the embeddings, half of the depth, and the last two.
        """
        last = num_target_layers - 1
        return self.feature_layers or (-1, num_target_layers // 2 - 1, last - 1, last)


def spec_former_config(shapes: Shapes, config: Mapping[str, Any]) -> SpecFormerConfig:
    """The config of a checkpoint. Raises `CheckpointError` naming a tensor that does not fit."""
    try:
        hidden, width = shapes["down_samp.weight"]
        query, key = (shapes[f"decoder_att.{name}_proj.weight"][0] for name in "qk")
        positional = shapes["positional.weight"][0]
        intermediate = shapes["encoder_ffn.up_proj.weight"][0]
    except KeyError as error:
        raise CheckpointError(f"the SpecFormer has no tensor {error}; fetch it again") from error
    num_heads = int(config.get("num_attention_heads") or 0)
    size = int(config.get("head_dim") or (query // num_heads if num_heads else 0))
    if width != 4 * hidden or positional % hidden or not size or query % size or key % size:
        raise CheckpointError(
            f"the SpecFormer's tensors do not fit each other: hidden size {hidden}, features of "
            f"{width}, {positional} numbers of drafts, queries of {query}, keys of {key} and heads "
            f"of {size}"
        )
    return SpecFormerConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=query // size,
        num_kv_heads=key // size,
        head_dim=size,
        draft_length=positional // hidden,
        feature_layers=tuple(int(index) for index in config.get("feature_layers") or ()),
        is_bidirectional=bool(config.get("is_bidirectional", True)),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        rope=rope_parameters(config),
    )


class SpecFormer(nn.Module):
    """The drafter; its tensors have the published names."""

    def __init__(self, config: SpecFormerConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=eps) for _ in range(config.num_features))
        self.down_samp = nn.Linear(config.num_features * hidden, hidden, bias=False)
        self.decoder_input_norm = nn.RMSNorm(hidden, eps=eps)
        self.decoder_att = _projections(config)
        self.positional_input_norm = nn.RMSNorm(hidden, eps=eps)
        self.positional = nn.Linear(hidden, config.draft_length * hidden)
        self.encoder_input_norm = nn.RMSNorm(hidden, eps=eps)
        self.encoder_att = _projections(config)
        self.encoder_ffn_input_norm = nn.RMSNorm(hidden, eps=eps)
        inner = config.intermediate_size
        self.encoder_ffn = nn.ModuleDict(
            {
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.rotation = HeadRotation(config.head_dim, config.max_positions, config.rope)
        # `normed_linear` of `kernels/linear/`, once the norms' scales are in `down_samp`.
        self._normed_linear: Callable[..., Tensor] | None = None

    def make_fast(self) -> None:
        """Compute `project` in one launch for few rows, where its device runs Triton's kernels.

        For inference: the scales of its norms become a part of the weights of `down_samp`, which
        are rounded once more.
        """
        if runs_triton(Machine.of(self.down_samp.weight.device)):
            self.use_normed_linear(load_normed_linear("triton"))

    @torch.no_grad()
    def use_normed_linear(self, normed_linear: Callable[..., Tensor]) -> None:
        """Compute `project` by a `normed_linear` of `kernels/linear/` from now on."""
        weight = self.down_samp.weight
        scales = torch.cat(list(self.norms.parameters()))
        folded = (weight.float() * scales.float()).to(weight.dtype)
        self.down_samp.weight = nn.Parameter(folded, requires_grad=False)
        for norm, scale in zip(self.norms, scales.chunk(len(self.norms)), strict=True):
            norm.weight = nn.Parameter(torch.ones_like(scale), requires_grad=False)
        self._normed_linear = normed_linear

    def project(self, features: Tensor) -> Tensor:
        """[..., rows, hidden_size] of the target's layers, [..., rows, 4 * hidden_size], side by
        side, each normed by itself."""
        if self._normed_linear is not None:
            rows = features.reshape(-1, features.shape[-1])
            weight, count = self.down_samp.weight, len(self.norms)
            known = self._normed_linear(rows, weight, count, self.config.rms_norm_eps)
            return known.view(*features.shape[:-1], -1)
        parts = features.split(self.config.hidden_size, dim=-1)
        normed = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        return self.down_samp(torch.cat(normed, dim=-1))

    def context(self, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[..., rows, hidden_size]: each row's summary of the text so far.

        state      [..., rows, hidden_size]  of `project`
        positions  int64 [..., rows]
        """
        queries, keys, values = self._heads(self.decoder_att, self.decoder_input_norm(state))
        rotation = self.rotation(state, positions)
        queries, keys = self.rotation.turned(rotation, queries, keys)
        attended = attend(0, queries, keys, values)
        return state + self.decoder_att["o_proj"](attended.flatten(-2))

    def drafts(self, context: Tensor) -> Tensor:
        """[..., draft_length, hidden_size] of rows' contexts [..., hidden_size].

        The target's last norm and output head make their logits.
        """
        state = self.positional(self.positional_input_norm(context))
        state = state.unflatten(-1, (self.config.draft_length, self.config.hidden_size))
        queries, keys, values = (
            part.transpose(-3, -2)
            for part in self._heads(self.encoder_att, self.encoder_input_norm(state))
        )
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=not self.config.is_bidirectional, enable_gqa=True
        ).transpose(-3, -2)
        state = state + self.encoder_att["o_proj"](attended.flatten(-2))
        normed, ffn = self.encoder_ffn_input_norm(state), self.encoder_ffn
        # The activation is on the values, unlike a decoder's.
        inner = ffn["gate_proj"](normed) * functional.silu(ffn["up_proj"](normed))
        return state + ffn["down_proj"](inner)

    def _heads(self, projections: nn.ModuleDict, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., rows, heads, head_dim]."""
        queries, keys, values = (
            projections[f"{name}_proj"](state).unflatten(-1, (-1, self.config.head_dim))
            for name in "qkv"
        )
        return queries, keys, values


def _projections(config: SpecFormerConfig) -> nn.ModuleDict:
    hidden = config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return nn.ModuleDict(
        {
            "q_proj": nn.Linear(hidden, query, bias=False),
            "k_proj": nn.Linear(hidden, key, bias=False),
            "v_proj": nn.Linear(hidden, key, bias=False),
            "o_proj": nn.Linear(query, hidden, bias=False),
        }
    )
