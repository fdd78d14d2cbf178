"""Attention over texts in fixed shapes, as graphs of heads need it.

Shapes name R requests, C rows of a text at most, and W rows of each request in a pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...models.attention.step_attention import PagedKv
from ...models.heads.dflash_config import RowView
from .networks.kept_keys import sides_of


class GatheredTexts:
    """Keys and values of texts, gathered once from a head's cache, with room for rows behind them.

    has_row  bool [R, C]: whether a text has a row there
    """

    def __init__(
        self, kv: PagedKv, slots: Tensor, lengths: Tensor, context: int, num_behind: int
    ) -> None:
        """`slots`: int32 [R * C], C of each request, of which the first `lengths`, int32 [R], are
        its text's; `num_behind`: rows behind each text, at most."""
        self.lengths, self.context = lengths, context
        columns = torch.arange(context, device=slots.device)
        self.has_row = columns < lengths[:, None]
        # [sides, R, kv_heads, C + rows behind, head_dim] of each layer
        self._stores: list[Tensor] = []
        for layer in range(len(kv.layers)):
            pairs = kv.gather(layer, slots).unflatten(0, (len(lengths), context))
            heads, head_dim = pairs.shape[3:]
            store = pairs.new_empty(
                pairs.shape[2], len(lengths), heads, context + num_behind, head_dim
            )
            store[:, :, :, :context] = pairs.permute(2, 0, 3, 1, 4)
            self._stores.append(store)

    def attend(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, first: int, mask: Tensor
    ) -> Tensor:
        """[..., heads, head_dim]: what rows attend to, which are kept from column `first` on.

        queries, keys, values  [..., heads, head_dim] of R * W rows, in any shape
        mask                   bool [R, W, first + W]
        """
        store, (requests, width, end) = self._stores[index], mask.shape
        kv_heads, head_dim = keys.shape[-2:]
        sides = sides_of(keys, values).reshape(-1, requests, width, kv_heads, head_dim)
        store[:, :, :, first:end] = sides.transpose(2, 3)
        # Query heads are folded into the rows of their key's head: no key is repeated.
        share = queries.shape[-2] // kv_heads
        grouped = queries.reshape(requests, width, kv_heads, share, -1)
        found = scaled_dot_product_attention(
            grouped.permute(0, 2, 3, 1, 4).flatten(2, 3),
            store[0, :, :, :end],
            store[-1, :, :, :end],
            attn_mask=mask.repeat(1, share, 1)[:, None],
        )
        return found.unflatten(2, (share, -1)).permute(0, 3, 1, 2, 4).reshape(queries.shape)


class TreeAttention:
    """An `Attend` (`models/heads/head_layer.py`) of the rows of a level of all trees, [R * W]: each
    sees its text and its path."""

    def __init__(self, texts: GatheredTexts, width: int) -> None:
        self._texts, self._first = texts, texts.context - width
        own = torch.eye(width, dtype=torch.bool, device=texts.has_row.device)
        self._own = own.expand(len(texts.has_row), -1, -1)
        # What each row of the level sees; the roots are rows of their texts.
        self._mask = texts.has_row[:, None].expand(-1, width, -1)

    def begin_level(self, parents: Tensor) -> None:
        """The rows of the next level, each behind one of the last: int64 [R, W]."""
        lines = parents[..., None].expand(-1, -1, self._mask.shape[-1])
        self._mask = torch.cat([self._mask.gather(1, lines), self._own], dim=-1)
        self._first += parents.shape[1]

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R * W, heads, head_dim]: what each row attends to."""
        return self._texts.attend(index, queries, keys, values, self._first, self._mask)


class RowsBehind:
    """An `Attend` of rows behind texts in one pass: a block, or masks.

    Distances count kept rows: where rows of a text are missing, a window reaches further back.
    """

    def __init__(self, texts: GatheredTexts, width: int, view: Callable[[int], RowView]) -> None:
        """`view`: what the rows see in a layer."""
        self._texts, self._view = texts, view
        self._masks: dict[RowView, Tensor] = {}
        columns = torch.arange(texts.context, device=texts.has_row.device)
        rows = torch.arange(width, device=columns.device)
        self._to_text = (texts.lengths[:, None] + rows)[..., None] - columns
        self._to_rows = (rows[:, None] - rows).expand(len(texts.lengths), -1, -1)

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[..., heads, head_dim]: what each of R * W rows attends to."""
        texts, view = self._texts, self._view(index)
        if view not in self._masks:
            of_text = view.sees(self._to_text) & texts.has_row[:, None]
            self._masks[view] = torch.cat([of_text, view.sees(self._to_rows)], dim=-1)
        mask = self._masks[view]
        return texts.attend(index, queries, keys, values, texts.context, mask)
