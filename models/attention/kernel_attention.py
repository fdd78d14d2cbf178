"""A stage's attention by draftline's kernels (`kernels/`), and by FlashAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from ...core.steps import StepInput
from ...kernels.attention.flash_attention import (
    FlashFunction,
    FlashOps,
    flash_attention,
    plan_flash,
)
from ...kernels.attention.spec import AttentionShape, LayerSpec
from ...kernels.attention.step_layout import LayoutCapacity, PartialResults, StepLayout
from ...kernels.attention.tile_plan import SplitRule
from ...kernels.device_tables import RecentTables
from ...kernels.dispatch import load_ops
from ...kernels.elementwise.reference import KvTarget
from .step_attention import PagedKv

# Programs of a launch of fixed size: a multiprocessor runs a few at once, and finished programs
# take the remaining items. Under the interpreter, empty programs only cost time.
PROGRAMS_PER_PROCESSOR = 16
PROGRAMS_INTERPRETED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOptions:
    """How steps are cut into tiles.

    max_requests  of a step; with fewer, long contexts of many rows are split further
    fixed_lines   tiles of every step have the same number of lines, so that the order of a row's
                  sums does not depend on the batch
    """

    max_requests: int = 256
    fixed_lines: bool = False


class StepKernels:
    """The attention of one step on one stage: writes the rows' KV, then attends."""

    def __init__(
        self, backend: KernelBackend, layout: StepLayout, attend: Callable[..., Tensor]
    ) -> None:
        """`attend` takes query, pairs and `LayerSpec`."""
        self._backend, self._layout, self._attend = backend, layout, attend

    def target(self, layer: int) -> KvTarget:
        """Where keys and values of the step's rows are stored."""
        kv, slots = self._backend.kv, self._layout.slots
        return KvTarget(kv.layers[layer], slots, self._backend.scales(layer))

    def write(self, layer: int, pairs: Tensor) -> None:
        """Store keys and values of the step's rows, [rows, 2, kv_heads, head_dim]."""
        self.write_heads(layer, pairs[:, 0], pairs[:, 1])

    def write_heads(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, each [rows, kv_heads, head_dim]."""
        kv = self._backend.kv
        self._backend.ops.write_kv(
            keys, values, kv.layers[layer], self._layout.slots, self._backend.scales(layer)
        )

    def attend(
        self, layer: int, query: Tensor, scaling: float,
        window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of `query` [rows, heads, head_dim], same shape; see `StepAttention.attend`.

        Of latents, queries have their rotated part behind, and results do not.
        """
        spec = LayerSpec(scaling, window, softcap, self._backend.scales(layer))
        return self._attend(query, self._backend.pairs[layer], spec)


class KernelBackend:
    """Attention by `paged_attention`; caches layouts of the last step sizes."""

    def __init__(
        self, kv: PagedKv, block_size: int, shape: AttentionShape, implementation: str = "triton",
        *, tiles: TileOptions | None = None,
    ) -> None:  # fmt: skip
        self.kv = kv
        self.ops = load_ops(implementation)
        self._shape, self.block_size = shape, block_size
        # Groups of heads that read the same latents do so by a stride of zero.
        self.pairs = [layer.expand(-1, -1, shape.num_kv_heads, -1) for layer in kv.layers]
        tiles = tiles or TileOptions()
        itemsize = kv.data.itemsize if kv.scales is None else 2
        rule = SplitRule.of(shape, tiles.max_requests, itemsize)
        self._tile_lines = rule.tile_lines if tiles.fixed_lines else None
        self._partials = PartialResults(shape, rule, tiles.max_requests, kv.data.device)
        self._layouts: RecentTables[tuple[str, LayoutCapacity], StepLayout] = RecentTables()

    @property
    def share(self) -> int:
        """Query heads of a key/value head: lines of a row."""
        return self._shape.share

    def begin(self, step: StepInput) -> StepKernels:
        """Attention of this step, valid until the next call."""
        layout = self.layout_of(step)
        layout.refill(step)
        return StepKernels(self, layout, self.attend_with(step, layout))

    def begin_static(self, layout: StepLayout, out: Tensor) -> StepKernels:
        """Attention of the step that `layout`, with fixed tiles, describes at run time.

        Every layer's result is in `out` [rows, heads, head_dim] until the next layer attends; rows
        that see nothing are left as they are.
        """
        attend = partial(_attend, self.ops.paged_attention, layout, out=out)
        return StepKernels(self, layout, attend)

    def empty_out(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Zeros [num_rows, heads, head_dim]."""
        size = (num_rows, self._shape.num_heads, self._shape.head_dim)
        return torch.zeros(size, dtype=dtype, device=self.kv.data.device)

    def tile_lines(self, most_rows: int) -> int:
        """Lines of a tile if the largest request of a step has this many rows."""
        return self._tile_lines or self._partials.rule.lines_of_tiles(most_rows)

    def static_layout(self, capacity: LayoutCapacity, lines: int) -> StepLayout:
        """A layout with fixed tiles of `lines` lines and fixed launches, for CUDA graphs."""
        self._partials = self._partials.holding(capacity.num_requests)
        return StepLayout(
            self._shape, capacity, self.block_size, self._partials, lines,
            programs=static_programs(self._shape, self.kv.data.device),
        )  # fmt: skip

    def move(self, moves: Tensor) -> None:
        """Copy slots in all layers; `moves` int64 [m, 2] (from, to). All are read first."""
        self.ops.move_kv(self.kv.data, moves)
        if self.kv.has_row_scales and self.kv.scales is not None:
            self.ops.move_kv(self.kv.scales, moves)

    def scales(self, layer: int) -> Tensor | None:
        """Factors of the layer's stored keys and values, as in `LayerSpec`; None: 1."""
        return None if self.kv.scales is None else self.kv.scales[layer]

    def layout_of(self, step: StepInput, use: str = "all") -> StepLayout:
        """A layout with room for the step, not yet filled; each `use` has its own."""
        capacity = LayoutCapacity.of(step, self.block_size)
        key = use, capacity
        layout = self._layouts.get(
            key,
            lambda: StepLayout(
                self._shape, capacity, self.block_size, self._partials, self._tile_lines
            ),
        )
        layout.partials = self._partials = self._partials.holding(len(step.context_lens))
        return layout

    def attend_with(self, _step: StepInput, layout: StepLayout) -> partial[Tensor]:
        """A function of query, pairs and `LayerSpec` for all layers of a step."""
        return partial(_attend, self.ops.paged_attention, layout)


class FlashBackend(KernelBackend):
    """Computes prompt chunks and committed contexts by FlashAttention, the rest as its base."""

    def __init__(
        self, kv: PagedKv, block_size: int, shape: AttentionShape,
        implementation: str = "triton", flash: FlashFunction | None = None,
        *, tiles: TileOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kv, block_size, shape, implementation, tiles=tiles)
        flash = _flash_function() if flash is None else flash
        self._flash_ops = FlashOps(flash, self.ops.paged_attention)

    def attend_with(self, step: StepInput, layout: StepLayout) -> partial[Tensor]:
        """A function of query, pairs and `LayerSpec`; `layout` is used for writing KV only."""
        trees, own_columns = self.layout_of(step, "trees"), self.layout_of(step, "own_columns")
        work = plan_flash(step, layout.block_size, trees, own_columns)
        return partial(flash_attention, self._flash_ops, work)


def static_programs(shape: AttentionShape, device: torch.device) -> int:
    """Programs for each key/value head, if their number must not depend on the step."""
    if device.type != "cuda":
        return PROGRAMS_INTERPRETED
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(processors * PROGRAMS_PER_PROCESSOR // shape.num_kv_heads, 1)


def _attend(
    ours: Callable[..., None], layout: StepLayout, query: Tensor, pairs: Tensor, spec: LayerSpec,
    *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if out is None:
        out = query.new_empty(*query.shape[:2], layout.shape.head_dim)
    ours(query, pairs, layout, spec, out)
    return out


def _flash_function() -> FlashFunction:
    return import_module("flash_attn").flash_attn_varlen_func
