"""Random steps for attention over paged KV, and what must come out, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from draftline.core.steps import StepInput
from draftline.core.tree.tree import unpack
from draftline.kernels.attention.spec import AttentionShape, LayerSpec
from draftline.kernels.attention.step_layout import LayoutCapacity, PartialResults, StepLayout
from draftline.kernels.attention.tile_plan import SplitRule
from support.inputs.steps import PagedRequest, Rows, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
# Largest error of results below 5 (times the scale of values): half a unit in the last place of the
# result and of the weights, which are rounded too.
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


@dataclass(frozen=True)
class Part:
    """One request of a step: a chunk of `num_rows`, or nodes with these `parents`."""

    context_len: int
    num_rows: int = 1
    parents: Sequence[int] | None = None
    in_flight: int = 0

    def rows(self, request: PagedRequest) -> Rows:
        if self.parents is None:
            return request.chunk([0] * self.num_rows, self.context_len)
        nodes = [0] * len(self.parents)
        return request.tree(nodes, self.parents, self.context_len, self.in_flight)

    @property
    def num_slots(self) -> int:
        return self.context_len + (self.num_rows if self.parents is None else len(self.parents))


@dataclass(frozen=True, eq=False)
class Case:
    """A step, the cache it reads, and its queries; slots that no row sees are NaN."""

    requests: Sequence[Rows]
    step: StepInput
    query: torch.Tensor
    pairs: torch.Tensor
    shape: AttentionShape
    spec: LayerSpec
    block_size: int

    def layout(self, split_lines: int = 256, **options: int) -> StepLayout:
        rule = SplitRule(self.shape.share, split_lines)
        partials = PartialResults(self.shape, rule, len(self.requests), DEVICE)
        capacity = LayoutCapacity.of(self.step, self.block_size)
        layout = StepLayout(self.shape, capacity, self.block_size, partials, **options)
        layout.refill(self.step)
        return layout

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Results [rows, heads, head_dim] and natural log-sums [rows, heads]."""
        pairs = self.pairs.to(torch.float64).cpu().numpy()
        if self.spec.scales is not None:
            pairs = pairs * self.spec.scales.to(torch.float64).cpu().numpy()[..., None]
        keys, values = pairs[:, 0], pairs[:, -1, :, : self.shape.head_dim]
        keys, values = (side.repeat(self.shape.share, axis=1) for side in (keys, values))
        query = self.query.to(torch.float64).cpu().numpy()
        out, sums = [], []
        for rows, first in zip(self.requests, self.step.request_starts, strict=False):
            slots, visible = seen_by(rows, self.block_size, self.spec.window)
            for row, sees in enumerate(visible):
                seen = slots[sees]
                logits = np.einsum("hd,chd->hc", query[first + row], keys[seen]) * self.spec.scaling
                if self.spec.softcap is not None:
                    logits = self.spec.softcap * np.tanh(logits / self.spec.softcap)
                weights = np.exp(logits)
                total = weights.sum(axis=1)
                out.append(np.einsum("hc,chd->hd", weights / total[:, None], values[seen]))
                sums.append(np.log(total))
        return np.array(out), np.array(sums)


def seen_by(rows: Rows, block_size: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Slots of all columns of a request, and which of its rows sees which."""
    context = PagedRequest(rows.blocks, block_size).slots(0, rows.context_len)
    own_slots, own_positions = rows.slots, rows.positions
    own = np.tri(len(rows.tokens), dtype=np.bool_)
    if rows.tree is not None:
        own_slots, own_positions = rows.tree.slots, rows.tree.positions
        own = unpack(rows.tree.ancestors, len(own_slots))
    columns = np.concatenate((np.arange(rows.context_len), own_positions))
    visible = np.concatenate((np.ones((len(own), rows.context_len), np.bool_), own), axis=1)
    if window is not None:
        visible &= rows.positions[:, None] - columns < window
    return np.concatenate((context, own_slots)), visible


def make_case(
    parts: Sequence[Part], shape: AttentionShape, spec: LayerSpec, *,
    dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None,
    block_size: int = 4, seed: int = 0,
) -> Case:  # fmt: skip
    """Requests over blocks in random order; `stored` is the cache's dtype."""
    rng = np.random.default_rng(seed)
    counts = [-(-part.num_slots // block_size) for part in parts]
    blocks = np.split(rng.permutation(sum(counts)), np.cumsum(counts)[:-1])
    requests = [
        part.rows(PagedRequest(own.tolist(), block_size))
        for part, own in zip(parts, blocks, strict=True)
    ]
    step = make_step(requests)
    num_slots = sum(counts) * block_size
    torch.manual_seed(seed)
    key_dim, num_sides = shape.head_dim + shape.rotated_dim, 1 if shape.rotated_dim else 2
    num_kept = 1 if shape.rotated_dim else shape.num_kv_heads
    query = torch.randn(len(step.token_ids), shape.num_heads, key_dim)
    pairs = torch.full((num_slots, num_sides, num_kept, key_dim), torch.nan)
    for rows in requests:
        slots, visible = seen_by(rows, block_size, spec.window)
        seen = torch.from_numpy(slots[visible.any(axis=0)])
        pairs[seen] = torch.randn(len(seen), *pairs.shape[1:])
    return Case(
        requests, step, query.to(DEVICE, dtype),
        pairs.to(DEVICE, stored or dtype).expand(-1, -1, shape.num_kv_heads, -1), shape, spec,
        block_size,
    )  # fmt: skip


def random_parents(count: int, seed: int = 0) -> list[int]:
    """Parents of a random tree, -1 for its roots."""
    rng = np.random.default_rng(seed)
    return [int(rng.integers(-1, node)) if node else -1 for node in range(count)]
