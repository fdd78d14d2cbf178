"""What is fixed about attention: of a model (`AttentionShape`), and of one call (`LayerSpec`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a stage's layers; query head h reads key/value head h // share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def share(self) -> int:
        """Query heads of a key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """How one layer attends.

    scaling  factor of the logits
    window   largest distance of absolute positions that is seen, plus one; None: all
    softcap  bound of the logits, by tanh (Gemma 2); None: none
    scales   what stored keys and values are multiplied by (FP8): float32 [2, kv_heads], or powers
             of two [slots, 2, kv_heads], one for every row; None: 1
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    scales: Tensor | None = None
