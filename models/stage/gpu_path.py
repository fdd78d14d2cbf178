"""A stage on a GPU: its layers as CUDA graphs, one launch a step instead of hundreds.

A graph is captured for several numbers of rows, and serves every step with at most as many: padding
rows write nothing, see nothing, and are never read. Attention tiles are as large as the rows allow.
For requests of few rows each, such as those without drafts, a second graph of the same size has the
smallest tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.steps import StepInput
from ...kernels.attention.step_layout import LayoutCapacity, StepLayout
from ...kernels.dispatch import Machine, load_invariant_linear, runs_triton, triton_obstacle
from ..attention.kernel_attention import KernelBackend
from ..attention.step_attention import PagedKv
from ..layers.linear_layers import (
    GpuHead,
    GpuLinear,
    GpuLinears,
    GpuPackedLinear,
    PackedLinear,
)
from ..layers.model_slice import ModelSlice, run_layers
from .options import GraphOptions, StageOptions
from .plain_path import HiddenStateTaps, PlainPath

Work = Callable[[], None]
FIELD = "batch_invariant"
# Rows of a program of batch-invariant products with quantised weights: more would be padding of
# steps of few rows, fewer would read the weights of a prompt too often.
ROW_TILE = 64
# Larger steps keep a GPU busy for longer than their launches take.
MOST_ROWS = 512
# Spacing is small around 65 rows, a tree of 64 nodes and its root.
SMALL_ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 128, 192)
# From this many rows on, there is a second graph for requests of few rows each.
LEAST_NARROW_ROWS = 16
ROWS_STEP = 128
# Words of ancestor bits a row: trees of 512 columns.
MOST_WORDS = 8
# Own columns in addition to two a row, for the nodes in flight of the smallest steps.
SPARE_COLUMNS = 64
logger = logging.getLogger(__name__)


class Capture(Protocol):
    """Makes work replayable. The work must read and write tensors at fixed addresses."""

    def __call__(self, work: Work) -> Work:
        """Run `work` at least once; returns a function that replays it without Python.

        Results in memory that `work` allocated are valid until the next replay of any work.
        """
        ...


class CudaCapture:
    """Captures CUDA graphs on a separate stream; all share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Capture `work` as a CUDA graph after one run of it; the function that replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Kernels are compiled and libraries make their workspaces in a first run: a capture
            # allows neither.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()
            torch.cuda.current_stream().wait_stream(self._stream)
            # Other threads, such as those of drafters, may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The captured graphs, largest first, and those skipped for lack of time.

    captured, given_up  rows of each graph
    narrow              rows of those with the smallest tiles, beside larger ones of as many rows
    """

    captured: tuple[int, ...]
    given_up: tuple[int, ...]
    seconds: float
    narrow: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _StepGraph:
    """A graph: its inputs besides the cache and the hidden states, and its replay function."""

    layout: StepLayout
    replay: Work


class GraphPath(PlainPath):
    """Replays a captured graph for each step that fits one; other steps run eagerly.

    `capture_all` comes after the kernels were compiled. Steps are launched without waiting for the
    device. `capture` may serve other work of the stage's thread, which then shares the memory.
    """

    def __init__(
        self, part: ModelSlice, kv: PagedKv, block_size: int, backend: KernelBackend,
        taps: HiddenStateTaps | None, options: GraphOptions, capture: Capture,
    ) -> None:  # fmt: skip
        super().__init__(part, kv, block_size, backend, taps)
        taps = self.taps
        self._backend = backend
        self._options, self.capture = options, capture
        self.rows = rows_of_graphs(options.max_rows)
        self._rotary.reserve(options.max_positions)
        # Graphs read exactly these tensors, which the table would replace if it grew.
        self._tables = self._rotary.tables
        like = torch.empty(self.rows[-1], 0, dtype=part.dtype, device=part.device)
        self._hidden = like.new_zeros(self.rows[-1], taps.input_size)
        self._out = like.new_zeros(self.rows[-1], taps.output_size)
        # Zeros at first, so that padding rows never hold uninitialised memory.
        self._attended = backend.empty_out(self.rows[-1], part.dtype)
        # Smallest first; those of the smallest tiles apart.
        self._graphs: list[_StepGraph] = []
        self._narrow: list[_StepGraph] = []

    @torch.inference_mode()
    def capture_all(
        self, clock: Callable[[], float], on_progress: Callable[[int], None] = lambda _: None
    ) -> GraphReport:
        """Capture the largest first, whose memory serves all, and those of small tiles last;
        `on_progress` gets each's rows.
        """
        start = clock()
        for graphs, wanted in ((self._graphs, self.rows), (self._narrow, self.narrow_rows)):
            for rows in reversed(wanted):
                if self._graphs and clock() - start > self._options.seconds:
                    break
                lines = self._backend.tile_lines(1 if graphs is self._narrow else rows)
                graphs.insert(0, self._captured(rows, lines))
                on_progress(rows)
        captured, narrow = (
            tuple(graph.layout.capacity.num_rows for graph in reversed(graphs))
            for graphs in (self._graphs, self._narrow)
        )
        given_up = tuple(rows for rows in reversed(self.rows) if rows not in captured)
        report = GraphReport(captured, given_up, clock() - start, narrow)
        logger.info(
            "event=graphs_captured graphs=%d narrow=%d largest_rows=%d given_up=%d seconds=%.1f",
            len(captured), len(narrow), captured[0], len(given_up), report.seconds,
        )  # fmt: skip
        return report

    @property
    def narrow_rows(self) -> tuple[int, ...]:
        """Numbers of rows that get a second graph with the smallest tiles, ascending.

        Excludes sizes whose first graph has the smallest tiles, and sizes that no number of such
        requests reaches.
        """
        lines = self._backend.tile_lines(1)
        most = self._options.max_requests * (lines // self._backend.share)
        sizes = zip((0, *self.rows), self.rows, strict=False)
        return tuple(
            rows for smaller, rows in sizes
            if rows >= LEAST_NARROW_ROWS and smaller < most
            and self._backend.tile_lines(rows) > lines
        )  # fmt: skip

    def hidden_states(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        """Run a step's layers: [rows, input_size] to [rows, output_size] of the taps.

        On the last stage the result is valid until the next step runs.
        """
        graph = self._find(step)
        if graph is None:
            return super().hidden_states(step, hidden)
        num_rows = len(step.token_ids)
        graph.layout.refill(step)
        if hidden is not None:
            self._hidden[:num_rows].copy_(hidden, non_blocking=True)
        graph.replay()
        out = self._out[:num_rows]
        # The next stage may still read the states when this one runs the next step.
        return out if self.part.head is not None else out.clone()

    def _find(self, step: StepInput) -> _StepGraph | None:
        if not len(step.token_ids) or int(step.positions.max()) >= self._options.max_positions:
            return None
        needed = LayoutCapacity.exact(step, self._backend.block_size)
        fitting = (graph for graph in self._graphs if graph.layout.capacity.holds(needed))
        graph = next(fitting, None)
        if graph is None:
            return None
        lines = self._backend.tile_lines(int(np.diff(step.request_starts).max()))
        narrow = (one for one in self._narrow if one.layout.capacity == graph.layout.capacity)
        return next((one for one in narrow if one.layout.tile_lines >= lines), graph)

    def _captured(self, rows: int, lines: int) -> _StepGraph:
        layout = self._backend.static_layout(self._capacity(rows), lines)
        attention = self._backend.begin_static(layout, self._attended[:rows])
        part = self.part

        def work() -> None:
            embed = part.embed
            states = self._hidden[:rows] if embed is None else embed(layout.token_ids)
            rotations = self._rotary.look_up(self._tables, layout.positions)
            self._out[:rows].copy_(
                self.taps.run(
                    states,
                    lambda states, span: run_layers(
                        part, states, layout.positions, rotations, attention, span=span
                    ),
                )
            )

        return _StepGraph(layout, self.capture(work))

    def _capacity(self, rows: int) -> LayoutCapacity:
        requests = min(rows, self._options.max_requests)
        block_size = self._backend.block_size
        blocks_of_one = -(-self._options.max_positions // block_size)
        # Requests may share blocks, which then appear in each of their tables.
        num_blocks = min(requests * blocks_of_one, 2 * self._backend.kv.num_slots // block_size)
        columns = 2 * rows + SPARE_COLUMNS
        words = min(-(-columns // 64), MOST_WORDS)
        return LayoutCapacity(rows, requests, columns, num_blocks, words)


def invariant_options(options: StageOptions, machine: Machine) -> StageOptions:
    """`options` with attention that splits a context independently of the batch.

    Raises `ConfigError` (`batch_invariant`) if another setting, or the machine, does not support
    it.
    """
    if options.attention not in ("auto", "triton"):
        raise ConfigError(
            FIELD, f"on needs draftline's own attention on a GPU, and attention is "
            f"{options.attention}: use attention: triton or auto, or batch_invariant: auto",
        )  # fmt: skip
    obstacle = triton_obstacle(machine)
    if obstacle is not None:
        raise ConfigError(
            FIELD, f"on needs draftline's kernels on a GPU: {obstacle}; or use "
            "batch_invariant: auto",
        )  # fmt: skip
    return replace(options, attention="triton")


def uses_fused_modules(device: str | torch.device, attention: str) -> bool:
    """Whether a stage on `device` has the modules of `models/layers/fused_modules.py`.

    `attention` is the stage's setting; `sdpa` asks for transformers' own modules.
    """
    return runs_triton(Machine.of(device)) and attention != "sdpa"


def rows_of_graphs(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, ascending, where steps have up to `max_rows`."""
    largest = min(max_rows, MOST_ROWS)
    wanted = (*SMALL_ROWS, *range(2 * ROWS_STEP, MOST_ROWS + 1, ROWS_STEP))
    return (*(rows for rows in wanted if rows < largest), largest)


class InvariantLinear:
    """A linear layer; `weight` [inputs, outputs] of any strides."""

    __slots__ = ("_out_dtype", "_product", "bias", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor],
        out_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """`product` is an `invariant_linear` of `kernels/linear/`."""
        self.weight, self.bias, self._product = weight, bias, product
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        return self._product(x, self.weight, self.bias, out_dtype=self._out_dtype)

    def gated(self, x: Tensor, activation: str) -> Tensor | None:  # noqa: ARG002 - as `GpuLinear`
        """None: its product has no gate."""
        return None


def invariant_slice(part: ModelSlice, implementation: str = "triton") -> ModelSlice:
    """`part`, of fused modules, with batch-invariant products, for `batch_invariant: on`.

    The operators between the products are row-wise already. The modules of `part` are changed, and
    no weight is copied. `implementation`: a name for `load_invariant_linear`. Raises `ConfigError`
    (`batch_invariant`) for layers that draftline's kernels do not support.
    """
    if not part.fast:
        raise ConfigError(
            FIELD, "on needs layers that draftline's kernels know, and these of "
            f"{part.config.model_type} are others: use batch_invariant: auto",
        )  # fmt: skip
    product = load_invariant_linear(implementation)
    for layer in part.layers:
        for module in list(layer.modules()):
            _replace_products(module, product)
    head = part.head
    if isinstance(head, GpuHead):
        # Logits stay in the dtype of the sums.
        head = InvariantLinear(head.weight.t(), head.bias, product, torch.float32)
    elif isinstance(head, GpuPackedLinear):
        head = head.invariant(ROW_TILE)
    return replace(part, head=head)


def _replace_products(module: nn.Module, product: Callable[..., Tensor]) -> None:
    for name, child in [*vars(module).items(), *module.named_children()]:
        if isinstance(child, GpuLinears):
            setattr(module, name, GpuLinears([_invariant(part, product) for part in child.parts]))
        elif isinstance(child, GpuLinear | GpuPackedLinear):
            setattr(module, name, _invariant(child, product))
        elif isinstance(child, nn.Linear | PackedLinear):
            # A module attribute only accepts modules.
            delattr(module, name)
            setattr(module, name, _invariant(child, product))


def _invariant(
    child: GpuLinear | GpuPackedLinear | nn.Linear | PackedLinear, product: Callable[..., Tensor]
) -> InvariantLinear | GpuPackedLinear:
    if isinstance(child, GpuPackedLinear):
        return child.invariant(ROW_TILE)
    if isinstance(child, PackedLinear):
        return GpuPackedLinear(child.weight, child.bias, child.product, row_tile=ROW_TILE)
    return InvariantLinear(child.weight.t(), child.bias, product)
