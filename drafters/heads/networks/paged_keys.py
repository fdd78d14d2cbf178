"""What a head keeps of a text in blocks, as the layers of its target do."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.attention.step_attention import PagedKv
from .head_network import HeadNetwork
from .kept_keys import KeptKeys


class PagedKeys(KeptKeys):
    """Keys and values of a text up to one step: those in the cache, and the step's own rows, which
    are written there.

    slots  int64  of the rows before the step, and behind them of the step's own
    """

    __slots__ = ("_kv", "_slots")

    def __init__(self, kv: PagedKv, slots: Tensor, num_before: int) -> None:
        super().__init__(len(kv.layers))
        self.num_rows = num_before
        self._kv = kv
        self._slots = slots

    def layer(self, index: int) -> Tensor | None:
        """[2, num_rows, kv_heads, head_dim]; None where there is nothing."""
        if self._layers[index] is None and len(self._slots):
            # With room for the step's own rows, whose slots hold anything yet.
            self._layers[index] = self._kv.gather(index, self._slots).transpose(0, 1).contiguous()
        return super().layer(index) if self.num_rows else None

    def append(self, index: int, keys: Tensor, values: Tensor) -> Tensor:
        """As of `KeptKeys`; what is appended is in the cache, too."""
        self.layer(index)
        own = self._slots[self.num_rows : self.num_rows + len(keys)]
        self._kv.write(index, own, torch.stack((keys, values), dim=1))
        return super().append(index, keys, values)


def paged_kv_of(
    network: HeadNetwork, num_slots: int, projected: Tensor, dtype: torch.dtype
) -> PagedKv:
    """An empty cache for what a head keeps of texts. `projected`: of any row, [1, width]."""
    device = network.device
    tried = KeptKeys(network.num_layers)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        network.read(projected, zero, zero, [tried], [1])
    kept = tried.layer(0) if network.num_layers else None
    # Parallel heads keep nothing.
    shape = (0, 0) if kept is None else (kept.shape[2], kept.shape[3])
    return PagedKv(network.num_layers, num_slots, *shape, dtype=dtype, device=str(device))
