"""One step's attention over a paged KV cache, whose masks are computed once for all layers.

Requests of similar size share one padded batch (a group). So the work of a layer depends on the
number of groups, not on that of tokens or requests. Grouped query heads are folded into the rows of
their key/value head: exact, and no key is ever repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.arrays import Bool, Int32, Int64
from ...core.steps import StepInput
from ...core.tree.tree import unpack
from ...kernels.cpu.large_pages import zeros

# Rows of a request from which query heads of one key/value head are not folded: by then each reads
# the keys as fast alone.
ROWS_APART = 64


class PagedKv:
    """Keys and values of a stage's layers; slot = block id * block size + offset.

    One tensor [layers, slots, 2, kv_heads, head_dim] holds both, key first, so that a layer's
    write and gather are one operation each. Latents, which are keys and values at once
    (`latent.py`), have one side: [layers, slots, 1, 1, head_dim + rotated_dim], of which the last
    `rotated_dim` are no part of the value. Contents begin as zeros: masked columns are multiplied
    by a probability of exactly zero and must therefore be finite.

    A cache of FP8 numbers (e4m3; backend `triton` only) has `scales` float32, which stored keys and
    values are multiplied by: [layers, 2, kv_heads], or [layers, slots, 2, kv_heads] of a scale for
    every row.
    """

    def __init__(
        self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int,
        rotated_dim: int = 0,
        *, dtype: torch.dtype = torch.float32, device: str = "cpu", scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.scales, self.rotated_dim = scales, rotated_dim
        self.num_slots = num_slots
        num_sides = 1 if rotated_dim else 2
        shape = (num_layers, num_slots, num_sides, num_kv_heads, head_dim + rotated_dim)
        if torch.device(device).type == "cpu":
            self.data = zeros(shape, dtype)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        # Views made once: indexing a tensor costs microseconds in every layer of every step.
        self.layers = self.data.unbind(0)

    @property
    def has_row_scales(self) -> bool:
        """Whether every row has scales of its own."""
        return self.scales is not None and self.scales.ndim == 4

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, with the scales of their rows."""
        scales = self.scales if self.has_row_scales else None
        return self.data.nbytes + (0 if scales is None else scales.nbytes)

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
        # By indexing: `index_select` and `index_copy_` copy all of a tensor whose layers lie apart.
        self.data[:, moves[:, 1]] = self.data[:, moves[:, 0]]


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """Rows `first:last` of the step, the slots of the columns, and which row sees which column."""

    first: int
    last: int
    slots: Int64
    visible: Bool
    context_len: int
    own_positions: Int32

    @property
    def positions(self) -> Int64:
        """Absolute position of each column."""
        return np.concatenate((np.arange(self.context_len), self.own_positions), dtype=np.int64)

    @property
    def bucket(self) -> tuple[int, int]:
        """Requests of one bucket are padded to one shape; less than half of a side is padding."""
        return (self.last - self.first - 1).bit_length(), (len(self.slots) - 1).bit_length()


class StepAttention:
    """The attention of one step on one stage: writes the rows' KV, then attends.

    Valid for one step; it must see the layers of that step only, each once.
    """

    def __init__(self, step: StepInput, kv: PagedKv, block_size: int) -> None:
        self.kv = kv
        self._write_slots = _as_index(step.slots.astype(np.int64), kv.data.device)
        row_positions = step.positions.astype(np.int64)
        buckets: dict[tuple[int, int], list[_Request]] = {}
        for index in range(len(step.context_lens)):
            request = _request(step, index, block_size)
            if request.last > request.first:
                buckets.setdefault(request.bucket, []).append(request)
        self._groups = [_Group(requests, row_positions, kv) for requests in buckets.values()]

    def attend(
        self, layer: int, query: Tensor, scaling: float,
        window: int | None = None, softcap: float | None = None,
        *, sinks: Tensor | None = None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of `query` [rows, heads, head_dim] in the stage's layer `layer`; same shape.

        window   the largest distance of positions that is seen, plus one
        softcap  bounds the logits as Gemma 2 does
        sinks    [heads]  a logit of each head that takes probability and brings nothing (gpt-oss)
        chunk    a position sees those of its own chunk of this size alone (Llama 4)
        """
        options = _Options(scaling, softcap, sinks, (window, chunk))
        if len(self._groups) == 1 and self._groups[0].takes_all_rows:
            return self._groups[0].attend(layer, query, options)
        out = torch.empty_like(query)
        for group in self._groups:
            rows = group.attend(layer, query[group.row_ids], options)
            if group.real_rows is None:
                out.index_copy_(0, group.row_ids, rows)
            else:
                out.index_copy_(0, group.row_ids[group.real_rows], rows[group.real_rows])
        return out

    def write(self, layer: int, pairs: Tensor) -> None:
        """Store keys and values of the step's rows, [rows, 2, kv_heads, head_dim]."""
        self.kv.write(layer, self._write_slots, pairs)

    def write_heads(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, each [rows, kv_heads, head_dim]; of latents the keys."""
        sides = (keys, values)[: self.kv.data.shape[2]]
        self.write(layer, torch.stack(sides, dim=1))


class SdpaBackend:
    """torch's own attention: the reference, and the backend on CPUs."""

    def __init__(self, kv: PagedKv, block_size: int) -> None:
        self._kv, self._block_size = kv, block_size

    def begin(self, step: StepInput) -> StepAttention:
        """Attention of this step, valid until the next call."""
        return StepAttention(step, self._kv, self._block_size)

    def move(self, moves: Tensor) -> None:
        """Copy slots in all layers; `moves` int64 [m, 2] (from, to). All are read first."""
        self._kv.move(moves)


# Window and chunk of `StepAttention.attend`.
_Reach = tuple[int | None, int | None]


class _Options(NamedTuple):
    """Those of `StepAttention.attend`."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    reach: _Reach


class _Group:
    """Requests padded to `batch` x `query_len` rows and `batch` x `num_columns` columns."""

    def __init__(self, requests: list[_Request], row_positions: Int64, kv: PagedKv) -> None:
        self.kv = kv
        self.batch = len(requests)
        self.query_len = max(request.last - request.first for request in requests)
        self.num_columns = max(len(request.slots) for request in requests)
        self._requests = requests
        self._step_positions = row_positions
        self._masks: dict[tuple[_Reach, int], Tensor | None] = {}
        device = kv.data.device
        slots = self._padded([request.slots for request in requests], self.num_columns)
        self._slots = _as_index(slots.ravel(), device)
        self._row_ids = self._padded(
            [np.arange(request.first, request.last) for request in requests], self.query_len
        )
        flat_ids = self._row_ids.ravel()
        self.takes_all_rows = len(flat_ids) == len(row_positions) and _in_a_row(flat_ids)
        self.row_ids = torch.from_numpy(flat_ids).to(device)
        lens = np.array([request.last - request.first for request in requests])
        real = np.flatnonzero(np.arange(self.query_len) < lens[:, None])
        self.real_rows = None if len(real) == len(flat_ids) else torch.from_numpy(real).to(device)

    def _padded(self, rows: list[Int64], width: int) -> Int64:
        """The rows stacked, each padded to `width` with its own first number.

        Another request's slot may hold NaN, which a probability of zero does not mask.
        """
        if len(rows) == 1:
            return rows[0][None]
        out = np.empty((len(rows), width), dtype=np.int64)
        for line, row in zip(out, rows, strict=True):
            line[: len(row)], line[len(row) :] = row, row[0]
        return out

    def attend(self, layer: int, query: Tensor, options: _Options) -> Tensor:
        """`query` [batch * query_len, heads, head_dim], in and out."""
        _, num_heads, head_dim = query.shape
        pairs = self.kv.gather(layer, self._slots)
        kv_heads = pairs.shape[2]
        sides = pairs.view(self.batch, self.num_columns, -1, kv_heads, head_dim)
        sides = sides.permute(2, 0, 3, 1, 4)
        keys, values = sides[0], sides[-1]
        if kv_heads == 1 and self.query_len >= ROWS_APART:
            # Views of the only head. The mask would otherwise be repeated for each query head.
            kv_heads = num_heads
            keys, values = (side.expand(-1, num_heads, -1, -1) for side in (keys, values))
        share = num_heads // kv_heads
        folded = (
            query.view(self.batch, self.query_len, kv_heads, share, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(self.batch, kv_heads, share * self.query_len, head_dim)
        )
        mask = self._mask(options.reach, share, query.dtype)
        if options.softcap is None and options.sinks is None:
            out = scaled_dot_product_attention(folded, keys, values, mask, scale=options.scaling)
        else:
            out = _spelled_attention(folded, keys, values, mask, options, share)
        return (
            out.view(self.batch, kv_heads, share, self.query_len, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(self.batch * self.query_len, num_heads, head_dim)
        )

    def _mask(self, reach: _Reach, share: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [batch, 1, share * query_len, columns]; None where every row sees all."""
        key = (reach, share)
        if key not in self._masks:
            self._masks[key] = self._build_mask(reach, share, dtype)
        return self._masks[key]

    def _build_mask(self, reach: _Reach, share: int, dtype: torch.dtype) -> Tensor | None:
        visible = self._visible()
        row_positions = self._step_positions[self._row_ids]
        window, chunk = reach
        if window is not None and row_positions.max() >= window:
            columns = self._padded([r.positions for r in self._requests], self.num_columns)
            visible = visible & (row_positions[:, :, None] - columns[:, None, :] < window)
        if chunk is not None and row_positions.max() >= chunk:
            columns = self._padded([r.positions for r in self._requests], self.num_columns)
            visible = visible & (row_positions[:, :, None] // chunk == columns[:, None, :] // chunk)
        if visible.all():
            return None
        additive = np.where(visible, np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(additive).to(self.kv.data.device, dtype)
        return mask.repeat(1, share, 1).unsqueeze(1)

    def _visible(self) -> Bool:
        """Which row sees which column, bool [batch, query_len, columns]."""
        if self.batch == 1:
            return self._requests[0].visible[None]
        # Padding rows see nothing; their results are dropped.
        visible = np.zeros((self.batch, self.query_len, self.num_columns), dtype=np.bool_)
        for page, request in zip(visible, self._requests, strict=True):
            num_rows, num_columns = request.visible.shape
            page[:num_rows, :num_columns] = request.visible
        return visible


def _spelled_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: _Options, share: int
) -> Tensor:
    """Attention with what torch's own has no option for, by the eager formulas of transformers.

    query  [batch, kv_heads, share * rows, head_dim]
    """
    logits = torch.matmul(query, keys.transpose(2, 3)) * options.scaling
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    if mask is not None:
        logits = logits + mask
    num_columns = logits.shape[-1]
    if options.sinks is not None:
        rows = logits.shape[2] // share
        sinks = options.sinks.view(logits.shape[1], share).repeat_interleave(rows, dim=1)
        sinks = sinks[None, :, :, None].expand(len(logits), -1, -1, 1)
        logits = torch.cat([logits, sinks.to(logits.dtype)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights[..., :num_columns], values)


def _request(step: StepInput, index: int, block_size: int) -> _Request:
    first, last = int(step.request_starts[index]), int(step.request_starts[index + 1])
    context_len = int(step.context_lens[index])
    num_blocks = -(-context_len // block_size)
    blocks = step.block_tables[index, :num_blocks].astype(np.int64)
    context = (blocks[:, None] * block_size + np.arange(block_size)).ravel()[:context_len]
    tree = step.trees[index]
    if tree is None:
        own_slots, own_positions = step.slots[first:last], step.positions[first:last]
        own_visible = np.tri(last - first, dtype=np.bool_)
    else:
        own_slots, own_positions = tree.slots, tree.positions
        own_visible = unpack(tree.ancestors, len(own_slots))
    visible = np.ones((last - first, context_len + len(own_slots)), dtype=np.bool_)
    visible[:, context_len:] = own_visible
    slots = np.concatenate((context, own_slots), dtype=np.int64)
    return _Request(first, last, slots, visible, context_len, own_positions)


def _as_index(slots: Int64, device: torch.device) -> Tensor | slice:
    """A slice where the slots lie in a row (then reads are views), else a tensor."""
    if len(slots) and _in_a_row(slots):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)


def _in_a_row(ids: Int64) -> bool:
    return bool((ids[1:] - ids[:-1] == 1).all())
