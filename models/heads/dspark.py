"""DSpark: DFlash whose logits also depend on the previous token (arXiv 2607.05147; DeepSpec).

A small Markov head adds a bias by the previous token to each draft's logits, so that the drafts of
a block are consistent. Only this head runs once for each draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .checkpoint_kind import SHIFTED, Shapes
from .dflash import DFlash
from .dflash_config import DFlashConfig, dflash_config

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True)
class DSparkConfig(DFlashConfig):
    """Sizes and switches of a DSpark drafter.

    markov_kind      the bias: by the token alone (vanilla), gated by its row's state, or by a
                     memory of all drafts before it (rnn)
    markov_rank      width between tokens and logits; 0: no Markov head
    confidence_size  input width of the confidence head: a draft's state, and the previous token if
                     it is wide enough; 0: there is none
    """

    markov_kind: MarkovKind = "vanilla"
    markov_rank: int = 0
    confidence_size: int = 0


def dspark_config(shapes: Shapes, config: Mapping[str, Any]) -> DSparkConfig:
    """The config of a checkpoint; by default its rows predict the next token.

    Raises `CheckpointError` as `dflash_config` does.
    """
    own = config.get("dflash_config") or {}
    if SHIFTED not in config and SHIFTED not in own:
        config = {**config, SHIFTED: True}
    base = dflash_config(shapes, config)
    rank = shapes.get("markov_head.markov_w1.weight", (0, 0))[1]
    kind: MarkovKind = "vanilla"
    if "markov_head.gate_proj.weight" in shapes:
        kind = "gated"
    elif "markov_head.joint_proj.weight" in shapes:
        kind = "rnn"
    return DSparkConfig(
        **{field.name: getattr(base, field.name) for field in fields(base)},
        markov_kind=kind,
        markov_rank=rank,
        confidence_size=shapes.get("confidence_head.proj.weight", (1, 0))[1],
    )


def published_markov_fields(config: DSparkConfig) -> dict[str, object]:
    """The config.json fields of a DSpark drafter besides DFlash's, as written by DeepSpec."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": bool(config.confidence_size),
        "confidence_head_with_markov": config.confidence_size > config.hidden_size,
    }


class MarkovHead(nn.Module):
    """The bias that a token adds to the logits of the next draft."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self._kind = config.markov_kind
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self._kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self._kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, states: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The bias on logits [..., draft vocabulary], and the new memory [..., rank].

        states  [..., hidden_size]  of the drafts' rows
        tokens  int64 [...] before the drafts, as ids of the target
        memory  [..., rank] after the previous draft; zeros at first
        """
        latent, memory = self.latent(states, tokens, memory)
        return self.markov_w2(latent), memory

    def latent(self, states: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The input of `markov_w2`, [..., rank], and the new memory."""
        latent = self.markov_w1(tokens)
        if self._kind == "gated":
            latent = self.gate_proj(torch.cat([states, latent], dim=-1)).sigmoid() * latent
        elif self._kind == "rnn":
            joint = self.joint_proj(torch.cat([memory, latent, states], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
            latent = output.tanh()
        return latent, memory


class ConfidenceHead(nn.Module):
    """The probability that a draft is accepted after accepted ones."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Logits [...] of that probability.

        states    [..., hidden_size]  of the drafts' rows
        embedded  [..., rank] `markov_w1` of the previous tokens; read if the head is wide enough
        """
        inputs = torch.cat([states, embedded], dim=-1)
        return self.proj(inputs[..., : self.proj.in_features]).squeeze(-1)


class DSpark(DFlash):
    """The drafter; its tensors have the published names."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        if config.confidence_size:
            self.confidence_head = ConfidenceHead(config.confidence_size)
