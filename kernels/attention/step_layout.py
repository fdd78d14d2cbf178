"""Where a step's rows, columns and tiles are, as device tensors that are refilled in place.

The addresses and launch sizes of a layout never change. So a CUDA graph captured with it can be
replayed for any step that fits its capacity. Each step needs one copy to the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.compiled import compiled
from ...core.steps import StepInput
from ..device_tables import StagedBuffer
from .spec import AttentionShape
from .tile_plan import ITEM_FIELDS, REQUEST_FIELDS, RequestRows, SplitRule, plan_tiles

NOTHING = np.empty(0, dtype=np.int32)
BLOCK_SECTIONS = ("first_blocks", "blocks")


class StepLayout:
    """The layout of one step after another; valid until the next `refill`. Empty at first.

    ancestors      int64 [rows, words]  bits of own columns (`core/tree/tree.py`), of trees
    requests       int32 [requests, REQUEST_FIELDS], items int32 [max items, ITEM_FIELDS]  as in
                   `tile_plan.py`
    item_count     int32 [1]  items in use
    first_blocks   int32 [requests]  where a request's block table begins in `blocks`
    blocks         int32 [blocks]
    token_ids      int32 [rows]
    positions      int32 [rows]; own_positions int32 [columns]  absolute
    slots          int32 [rows]  where the rows' KV is written; -1: nowhere
    own_slots      int32 [columns]
    tile_lines     lines of a tile: `tile_rows` rows times the heads that share a key

    With `tile_lines`, the tile size is independent of the step. With `programs`, the launch size
    is, too, as CUDA graphs require: that many programs for each key/value head loop over the items.
    """

    def __init__(
        self, shape: AttentionShape, capacity: LayoutCapacity, block_size: int,
        partials: PartialResults, tile_lines: int | None = None, *, programs: int | None = None,
    ) -> None:  # fmt: skip
        assert programs is None or tile_lines is not None
        self.shape, self.capacity, self.block_size = shape, capacity, block_size
        self.partials = partials
        self._fixed_lines, self._programs = tile_lines, programs
        self.tile_lines = tile_lines or partials.rule.lines_of_tiles(1)
        self.max_items = partials.rule.most_items(capacity.num_rows, capacity.num_requests)
        self.num_items, self.num_lines = 0, 0
        self._sections = self._make_sections()
        size = max(section.stop for section in self._sections.values())
        self._buffer = StagedBuffer(size, partials.out.device)
        self._host = self._buffer.next()
        self.ancestors = self._view("ancestors").view(torch.int64).view(-1, capacity.num_words)
        self.requests = self._view("requests").view(-1, REQUEST_FIELDS)
        self.items = self._view("items").view(-1, ITEM_FIELDS)
        self.item_count = self._view("item_count")
        self.first_blocks, self.blocks = self._view("first_blocks"), self._view("blocks")
        self.token_ids = self._view("token_ids")
        self.positions, self.slots = self._view("positions"), self._view("slots")
        self.own_positions, self.own_slots = self._view("own_positions"), self._view("own_slots")
        self.slots.fill_(-1)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.num_bytes

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.tile_lines // self.shape.share

    @property
    def launch_items(self) -> int:
        """Programs to launch for each key/value head."""
        return self.num_items if self._programs is None else min(self._programs, self.max_items)

    def refill(self, step: StepInput, only: Collection[int] | None = None) -> None:
        """Describe `step`, which must fit; with `only`, no rows but those of these requests.

        The step's KV moves are not part of it.
        """
        assert self.capacity.holds(LayoutCapacity.exact(step, self.block_size))
        requests, rule = _request_rows(step, only), self.partials.rule
        if self._fixed_lines is None:
            most_rows = int(requests.column(1).max(initial=0))
            self.tile_lines = rule.lines_of_tiles(most_rows)
        plan = plan_tiles(requests, self.tile_rows, rule)
        assert len(plan.items) <= self.max_items
        assert plan.num_lines <= len(self.partials.sums)
        self.num_items, self.num_lines = len(plan.items), plan.num_lines
        self._host = self._buffer.next()
        self._put("requests", requests.table, 0)
        self._put("items", plan.items)
        self._put("item_count", np.array([len(plan.items)]))
        self._put("token_ids", step.token_ids, 0)
        self._put("positions", step.positions, 0)
        self._put("slots", step.slots, -1)
        self._put_own(step)
        self._buffer.send(self._put_blocks(step))

    def _put_own(self, step: StepInput) -> None:
        starts = step.request_starts.tolist()
        own_slots, own_positions = [NOTHING], [NOTHING]
        words = self._host[self._sections["ancestors"]].view(np.int64)
        words = words.reshape(-1, self.capacity.num_words)
        for index, tree in enumerate(step.trees):
            rows = slice(starts[index], starts[index + 1])
            if tree is None:
                own_slots.append(step.slots[rows])
                own_positions.append(step.positions[rows])
                continue
            own_slots.append(tree.slots)
            own_positions.append(tree.positions)
            words[rows] = 0
            words[rows, : tree.ancestors.shape[1]] = tree.ancestors.view(np.int64)
        self._put("own_slots", np.concatenate(own_slots))
        self._put("own_positions", np.concatenate(own_positions))

    def _put_blocks(self, step: StepInput) -> int:
        """Put the block tables behind all other sections; how much of the buffer is in use."""
        first_blocks, blocks = (self._host[self._sections[name]] for name in BLOCK_SECTIONS)
        tables = (step.context_lens, step.block_tables, self.block_size)
        return self._sections["blocks"].start + _list_blocks(*tables, first_blocks, blocks)

    def _put(self, name: str, values: np.ndarray, rest: int | None = None) -> None:
        section = self._sections[name]
        first_free = section.start + values.size
        self._host[section.start : first_free] = values.ravel()
        if rest is not None:
            self._host[first_free : section.stop] = rest

    def _view(self, name: str) -> Tensor:
        return self._buffer.device[self._sections[name]]

    def _make_sections(self) -> Mapping[str, slice]:
        """Where each array lies in the buffer; the 64-bit words first, for their alignment."""
        rows, requests, columns, blocks, words = astuple(self.capacity)
        sizes = {
            "ancestors": 2 * rows * words,
            "requests": requests * REQUEST_FIELDS,
            "item_count": 1,
            "items": self.max_items * ITEM_FIELDS,
            "token_ids": rows,
            "positions": rows,
            "slots": rows,
            "own_slots": columns,
            "own_positions": columns,
            "first_blocks": requests,
            "blocks": blocks,
        }
        return StagedBuffer.sections(sizes)


@compiled
def _list_blocks(
    context_lens: Int32, tables: Int32, block_size: int, first_blocks: Int32, blocks: Int32
) -> int:
    """Write the blocks that contexts have, request by request; returns how many there are."""
    total = 0
    for request in range(len(context_lens)):
        first_blocks[request] = total
        for index in range(-(-context_lens[request] // block_size)):
            blocks[total] = tables[request, index]
            total += 1
    return total


def _request_rows(step: StepInput, only: Collection[int] | None) -> RequestRows:
    starts = step.request_starts
    table = np.empty((len(starts) - 1, REQUEST_FIELDS), dtype=np.int32)
    num_rows = table[:, 1]
    table[:, 0] = starts[:-1]
    np.subtract(starts[1:], starts[:-1], out=num_rows)
    table[:, 2] = step.context_lens
    table[:, 4] = [
        rows if tree is None else len(tree.slots)
        for rows, tree in zip(num_rows.tolist(), step.trees, strict=True)
    ]
    table[:, 3] = table[:, 4].cumsum() - table[:, 4]
    table[:, 5] = [tree is None for tree in step.trees]
    if only is not None:
        num_rows[~np.isin(np.arange(len(num_rows)), list(only))] = 0
    return RequestRows(table)


@dataclass(frozen=True, slots=True)
class LayoutCapacity:
    """The largest step that a layout holds.

    num_columns  own columns of all requests: rows, and nodes in flight
    num_blocks   entries of all requests' block tables together
    num_words    64-bit words of ancestor bits of a row
    """

    num_rows: int
    num_requests: int
    num_columns: int
    num_blocks: int
    num_words: int

    @classmethod
    def of(cls, step: StepInput, block_size: int) -> LayoutCapacity:
        """The capacity for a step, each side rounded up to a power of two so that few serve all."""
        sides = astuple(cls.exact(step, block_size))
        return cls(*(1 << max(side - 1, 0).bit_length() for side in sides))

    @classmethod
    def exact(cls, step: StepInput, block_size: int) -> LayoutCapacity:
        """The least capacity that holds a step."""
        trees = [tree for tree in step.trees if tree is not None]
        in_flight = sum(len(tree.slots) - len(tree.ancestors) for tree in trees)
        num_rows = len(step.token_ids)
        return cls(
            num_rows,
            len(step.context_lens),
            num_rows + in_flight,
            int((-(-step.context_lens // block_size)).sum()),
            max((tree.ancestors.shape[1] for tree in trees), default=1),
        )

    def holds(self, other: LayoutCapacity) -> bool:
        """Whether a step of capacity `other` fits."""
        return (
            self.num_rows >= other.num_rows
            and self.num_requests >= other.num_requests
            and self.num_columns >= other.num_columns
            and self.num_blocks >= other.num_blocks
            and self.num_words >= other.num_words
        )


class PartialResults:
    """Room for the partial results of split contexts; layouts whose steps run in turn share it.

    out      float32 [lines, kv_heads, head_dim]
    sums     float32 [lines, kv_heads]  log-sum-exp to the base 2
    arrived  int32 [lines, kv_heads] at the first line of a tile: how many of its splits are done; 0
             between launches
    """

    def __init__(
        self, shape: AttentionShape, rule: SplitRule, num_requests: int, device: torch.device
    ) -> None:
        """Room for every step of `num_requests` requests, split by `rule`."""
        self.rule, self._shape, self._num_requests = rule, shape, num_requests
        sizes = (max(num_requests, 1) * rule.split_lines, shape.num_kv_heads)
        self.out = torch.empty((*sizes, shape.head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty(sizes, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(sizes, dtype=torch.int32, device=device)

    def holding(self, num_requests: int) -> PartialResults:
        """This object, or a larger one for more requests; both split a context in the same way."""
        if num_requests <= self._num_requests:
            return self
        return PartialResults(self._shape, self.rule, num_requests, self.out.device)
