"""Keys and values that a head keeps of a text or a tree, and attention over them.

They are sides of one tensor, the keys first. Latents have one side, which is key and value at once
(`models/attention/latent.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ....models.attention.step_attention import PagedKv

FIRST_ROOM = 64


def sides_of(keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values [..., kv_heads, head_dim] as [2, ...]; [1, ...] if both are one tensor."""
    return keys[None] if values is keys else torch.stack((keys, values))


class KeptKeys:
    """Keys and values [sides, rows, kv_heads, head_dim] of each layer; grows by appending."""

    __slots__ = ("_layers", "num_rows")

    def __init__(self, num_layers: int) -> None:
        self._layers: list[Tensor | None] = [None] * num_layers
        self.num_rows = 0

    @property
    def num_bytes(self) -> int:
        """Of all layers, with the room to grow."""
        return sum(layer.nbytes for layer in self._layers if layer is not None)

    def layer(self, index: int) -> Tensor | None:
        """[sides, num_rows, kv_heads, head_dim]; None while nothing is kept."""
        kept = self._layers[index]
        return None if kept is None else kept[:, : self.num_rows]

    def behind(self) -> KeptKeys:
        """These rows, to which others are appended that these do not get.

        They lie in the room behind these, until these grow.
        """
        found = KeptKeys(0)
        found._layers = self._rooms()
        found.num_rows = self.num_rows
        return found

    def _rooms(self) -> list[Tensor | None]:
        """`layer` of all of them, with what room there is behind it."""
        return list(self._layers)

    def append(self, index: int, own: Tensor) -> Tensor:
        """Keep rows [sides, rows, kv_heads, head_dim] in a layer: all that it holds now.

        They count for the others when `num_rows` is raised, after the last layer.
        """
        end = self.num_rows + own.shape[1]
        kept = self._layers[index]
        if kept is None or end > kept.shape[1]:
            room = max(FIRST_ROOM, 2 * end)
            grown = own.new_empty(len(own), room, *own.shape[2:])
            if kept is not None:
                grown[:, : self.num_rows] = kept[:, : self.num_rows]
            self._layers[index] = kept = grown
        kept[:, self.num_rows : end] = own
        return kept[:, :end]

    def keep_first(self, count: int) -> None:
        """Let the rows behind the first `count` go."""
        self.num_rows = min(self.num_rows, count)

    def drop_oldest(self, count: int) -> None:
        """Let the first rows go."""
        left = self.num_rows - count
        for index, kept in enumerate(self._layers):
            if kept is not None:
                self._layers[index] = kept[:, count : self.num_rows].clone()
        self.num_rows = left


class KeySegment(NamedTuple):
    """Rows of one request in a pass.

    rows  which of the pass
    kept  what they attend to, and where their own keys and values go
    mask  bool [rows, n]: which of the last n rows that are kept then, their own included, each
          sees; they see all that are before. None: these as well
    """

    rows: slice
    kept: KeptKeys
    mask: Tensor | None


class SegmentAttention:
    """An `Attend` (`models/heads/head_layer.py`) over what is kept of several requests."""

    def __init__(self, segments: Sequence[KeySegment]) -> None:
        self._segments = segments

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[rows, heads, head_dim]: what each row attends to."""
        own, heads = sides_of(keys, values), keys.shape[1]
        attended = torch.empty_like(queries)
        for rows, kept, own_mask in self._segments:
            seen = kept.append(index, own[:, rows])
            mask = own_mask
            if mask is not None:
                before = mask.new_ones(len(mask), seen.shape[1] - mask.shape[1])
                mask = torch.cat([before, mask], dim=1)
            # [kv_heads, share, rows, head_dim]: no key is repeated.
            grouped = queries[rows].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
            keyed = seen.transpose(1, 2)[:, :, None].expand(-1, -1, grouped.shape[1], -1, -1)
            found = scaled_dot_product_attention(grouped, keyed[0], keyed[-1], attn_mask=mask)
            attended[rows] = found.permute(2, 0, 1, 3).flatten(1, 2)
        return attended

    def keep(self) -> None:
        """The rows of the pass count from now on; call it after the last layer."""
        for segment in self._segments:
            segment.kept.num_rows += segment.rows.stop - segment.rows.start


def causal_mask(num_rows: int, device: torch.device) -> Tensor | None:
    """bool [num_rows, num_rows]: each row sees those before it, and itself; None of one row."""
    if num_rows == 1:
        return None
    return torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()


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
        """[sides, num_rows, kv_heads, head_dim]; None where there is nothing."""
        if self._layers[index] is None and len(self._slots):
            # The step's own rows among them, whose slots hold anything yet.
            gathered = self._kv.gather(index, self._slots).transpose(0, 1)
            sides, count, *shape = gathered.shape
            self._layers[index] = room = gathered.new_empty(sides, count + FIRST_ROOM, *shape)
            room[:, :count] = gathered
        return super().layer(index) if self.num_rows else None

    def _rooms(self) -> list[Tensor | None]:
        for index in range(len(self._layers)):
            self.layer(index)
        return super()._rooms()

    def append(self, index: int, own: Tensor) -> Tensor:
        """As of `KeptKeys`; what is appended is in the cache, too."""
        self.layer(index)
        slots = self._slots[self.num_rows : self.num_rows + own.shape[1]]
        self._kv.write(index, slots, own.transpose(0, 1))
        return super().append(index, own)
