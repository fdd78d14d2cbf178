"""What a head shares with its target: embeddings, last norm and output head, loaded apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..layers.model_slice import Projection, embedded, load_slice
from ..load.model_info import ModelInfo
from ..load.partition import LayerSpan


@dataclass(frozen=True, slots=True, eq=False)
class SharedParts:
    """Parts of a target, on the head's device."""

    embed: nn.Module
    norm: nn.Module
    head: Projection
    softcap: float | None

    def embeddings(self, tokens: Tensor) -> Tensor:
        """[n, hidden_size] of token ids int64 [n]."""
        return embedded(self.embed, tokens)

    def logits(self, states: Tensor) -> Tensor:
        """float32 [n, vocabulary] of normed states [n, hidden_size]."""
        logits = self.head(states).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def load_shared_parts(target: ModelInfo, dtype: str, device: str) -> SharedParts:
    """Raises `CheckpointError`, or `ConfigError` (`dtype`)."""
    count = target.num_layers
    # Slices hold a layer at least, which is let go.
    first = load_slice(target.path, LayerSpan(0, 1, count), dtype, device)
    last = load_slice(target.path, LayerSpan(count - 1, count, count), dtype, device)
    assert first.embed is not None
    assert last.norm is not None
    assert last.head is not None
    softcap = getattr(last.config, "final_logit_softcapping", None)
    return SharedParts(first.embed, last.norm, last.head, softcap)
