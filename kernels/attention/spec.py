"""What is fixed about attention: of a model (`AttentionShape`), and of one call (`LayerSpec`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Query heads that read a latent together: their results of one row are in one tile, and long.
MOST_SHARE_OF_LATENTS = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a stage's layers; query head h reads key/value head h // share.

    rotated_dim  of latents, which are keys and values at once: numbers of a key, and of a query,
                 behind the `head_dim` that are its value; 0: keys and values are apart
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated_dim: int = 0

    @classmethod
    def of_latents(cls, num_heads: int, rank: int, rotated_dim: int) -> AttentionShape:
        """One latent for all query heads, whose groups read it as if each had its own."""
        most = min(num_heads, MOST_SHARE_OF_LATENTS)
        share = next(count for count in range(most, 0, -1) if num_heads % count == 0)
        return cls(num_heads, num_heads // share, rank, rotated_dim)

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
