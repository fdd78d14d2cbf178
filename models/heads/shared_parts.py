"""The modules that a head shares with its target: embeddings, last norm and output head, loaded
separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..layers.model_slice import Projection, embedded, load_slice
from ..load.model_info import ModelInfo
from ..load.partition import LayerSpan


@dataclass(frozen=True, slots=True, eq=False)
class SharedParts:
    """Parts of a target, on the head's device.

    head  [n, vocabulary] of normed states [n, hidden_size]
    """

    embed: nn.Module
    norm: Callable[[Tensor], Tensor]
    head: Projection
    softcap: float | None

    def embeddings(self, tokens: Tensor) -> Tensor:
        """[n, hidden_size] of token ids int64 [n]."""
        return embedded(self.embed, tokens)

    def logits(self, states: Tensor) -> Tensor:
        """float32 [n, vocabulary] of normed states [n, hidden_size]."""
        logits = self.head(states).float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_shared_parts(target: ModelInfo, dtype: str, device: str) -> SharedParts:
    """Raises `CheckpointError`, or `ConfigError` (`dtype`)."""
    count = target.num_layers
    # A slice has at least one layer, which is dropped.
    last = load_slice(target.path, LayerSpan(count - 1, count, count), dtype, device)
    assert last.norm is not None
    assert last.head is not None
    embed = load_embedding(target, dtype, device)
    return SharedParts(embed, last.norm, last.head, last.softcap)


def load_embedding(target: ModelInfo, dtype: str, device: str) -> nn.Module:
    """The target's embeddings. Raises `CheckpointError`, or `ConfigError` (`dtype`)."""
    first = load_slice(target.path, LayerSpan(0, 1, target.num_layers), dtype, device)
    assert first.embed is not None
    return first.embed
