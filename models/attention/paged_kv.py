"""The key/value cache of one stage, addressed by slots."""

from __future__ import annotations

import torch
from torch import Tensor


class PagedKv:
    """Keys and values of a stage's layers; slot = block id * block size + offset.

    One tensor [layers, slots, 2, kv_heads, head_dim] holds both, key first, so that a layer's
    write and gather are one operation each. Contents begin as zeros: masked columns are
    multiplied by a probability of exactly zero and must therefore be finite.

    A cache of FP8 numbers (e4m3; backend `triton` only) has `scales` float32 [layers, 2, kv_heads],
    which stored keys and values are multiplied by; None: 1.
    """

    def __init__(  # noqa: PLR0913 - one parameter a fact
        self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int,
        *, dtype: torch.dtype = torch.float32, device: str = "cpu", scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.scales = scales
        self.num_slots = num_slots
        shape = (num_layers, num_slots, 2, num_kv_heads, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        # Views made once: indexing a tensor costs microseconds in every layer of every step.
        self.layers = self.data.unbind(0)

    def write(self, layer: int, slots: Tensor | slice, pairs: Tensor) -> None:
        """Write `pairs` [n, 2, kv_heads, head_dim] at `slots` (int64 [n], or n slots in a row)."""
        if isinstance(slots, slice):
            self.layers[layer][slots].copy_(pairs)
        else:
            self.layers[layer].index_copy_(0, slots, pairs)

    def gather(self, layer: int, slots: Tensor | slice) -> Tensor:
        """Pairs at `slots`, [n, 2, kv_heads, head_dim]; a view where slots lie in a row."""
        if isinstance(slots, slice):
            return self.layers[layer][slots]
        return self.layers[layer].index_select(0, slots)

    def move(self, moves: Tensor) -> None:
        """Copy slots in all layers; `moves` int64 [m, 2] (from, to). All are read first."""
        self.data.index_copy_(1, moves[:, 1], self.data.index_select(1, moves[:, 0]))
