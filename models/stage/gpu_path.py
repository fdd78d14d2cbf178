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
from ...kernels.recurrence.step_tables import StepTables, TablesCapacity
from ..attention.kernel_attention import KernelBackend, StepKernels
from ..attention.step_attention import PagedKv
from ..layers.linear_layers import (
    GpuHead,
    GpuLinear,
    GpuLinears,
    GpuPackedLinear,
    PackedLinear,
)
from ..layers.model_slice import ModelSlice, run_layers
from ..recurrence.state_pool import StatePool, StepStates
from ..recurrence.step_plan import StepPlan
from .options import GraphOptions, StageOptions
from .plain_path import HiddenStateTaps, PlainPath, RunLayers

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

    def obstacle(self, work: Work) -> str | None:
        """Run `work` once, which ran before; why it cannot be replayed, None where it can."""
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

    def obstacle(self, work: Work) -> str | None:
        """What of it waits for the device; a capture of that would leave the device's context
        unusable. Only for starts: waits of other threads raise meanwhile, too.
        """
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return None


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
    """A graph: its inputs besides the cache and the hidden states, and its replay function.

    tables  of layers that keep states; None: none does
    """

    layout: StepLayout
    tables: StepTables | None
    replay: Work

    def holds(self, layout: LayoutCapacity, tables: TablesCapacity | None) -> bool:
        """Whether a step of these capacities fits."""
        if (
            self.tables is not None
            and tables is not None
            and not self.tables.capacity.holds(tables)
        ):
            return False
        return self.layout.capacity.holds(layout)


class GraphPath(PlainPath):
    """Replays a captured graph for each step that fits one; other steps run eagerly.

    `capture_all` comes after the kernels were compiled. Steps are launched without waiting for the
    device. `capture` may serve other work of the stage's thread, which then shares the memory.
    """

    def __init__(
        self, part: ModelSlice, kv: PagedKv, block_size: int, backend: KernelBackend,
        taps: HiddenStateTaps | None, options: GraphOptions, capture: Capture,
        states: StatePool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(part, kv, block_size, backend, taps, states)
        taps = self.taps
        self._backend = backend
        self._options, self.capture = options, capture
        self.rows = rows_of_graphs(options.max_rows)
        if part.forward is None:
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
        # What graphs read and write of states, which growth would replace.
        self._num_kept_rows = 0

    @torch.inference_mode()
    def capture_all(
        self, clock: Callable[[], float], on_progress: Callable[[int], None] = lambda _: None
    ) -> GraphReport:
        """Capture the largest first, whose memory serves all, and those of small tiles last;
        `on_progress` gets each's rows.

        None are captured where the layers are transformers' and wait for the device; the log says
        so.
        """
        start = clock()
        if self.states is not None:
            self._num_kept_rows = self.states.num_rows
        if self.part.forward is not None and (obstacle := self._obstacle()) is not None:
            logger.warning(
                "event=graphs_not_captured model_type=%s reason=%r: steps run without CUDA graphs",
                self.part.config.model_type, obstacle,
            )  # fmt: skip
            return GraphReport((), self.rows[::-1], clock() - start)
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
        plan = None if self.states is None else self.states.plan(step)
        graph = self._find(step, plan)
        if graph is None:
            return self._run(step, hidden, plan)
        num_rows = len(step.token_ids)
        graph.layout.refill(step)
        if plan is not None and graph.tables is not None:
            plan.fill(graph.tables)
        if hidden is not None:
            self._hidden[:num_rows].copy_(hidden, non_blocking=True)
        graph.replay()
        out = self._out[:num_rows]
        # The next stage may still read the states when this one runs the next step.
        return out if self.part.head is not None else out.clone()

    def _find(self, step: StepInput, plan: StepPlan | None) -> _StepGraph | None:
        if not len(step.token_ids) or int(step.positions.max()) >= self._options.max_positions:
            return None
        if plan is not None and plan.copies_states:
            return None
        self._drop_stale()
        needed = LayoutCapacity.exact(step, self._backend.block_size)
        of_states = None if plan is None else plan.capacity
        graph = next((one for one in self._graphs if one.holds(needed, of_states)), None)
        if graph is None:
            return None
        lines = self._backend.tile_lines(int(np.diff(step.request_starts).max()))
        narrow = (one for one in self._narrow if one.layout.capacity == graph.layout.capacity)
        return next((one for one in narrow if one.layout.tile_lines >= lines), graph)

    def _drop_stale(self) -> None:
        if self.states is None or self.states.num_rows == self._num_kept_rows or not self._graphs:
            return
        self._graphs.clear()
        self._narrow.clear()
        logger.warning(
            "event=graphs_dropped reason='more rows of states are kept than were foreseen': steps "
            "run without CUDA graphs"
        )

    def _obstacle(self) -> str | None:
        """Why steps cannot be captured; None where they can."""
        rows = self.rows[-1]
        _, _, work = self._static_work(rows, self._backend.tile_lines(rows))
        work()
        return self.capture.obstacle(work)

    def _captured(self, rows: int, lines: int) -> _StepGraph:
        layout, tables, work = self._static_work(rows, lines)
        return _StepGraph(layout, tables, self.capture(work))

    def _static_work(self, rows: int, lines: int) -> tuple[StepLayout, StepTables | None, Work]:
        """The layers of a step that a layout and tables describe at run time."""
        capacity = self._capacity(rows)
        layout = self._backend.static_layout(capacity, lines)
        attention = self._backend.begin_static(layout, self._attended[:rows])
        tables = kept = None
        if self.states is not None:
            sizes = capacity.num_rows, capacity.num_requests, capacity.num_columns
            tables = self.states.static_tables(*sizes)
            kept = self.states.begin_static(tables)

        def work() -> None:
            states, run = self._layers(layout, attention, kept)
            self._out[:rows].copy_(self.taps.run(states, run))

        return layout, tables, work

    def _layers(
        self, layout: StepLayout, attention: StepKernels, kept: StepStates | None
    ) -> tuple[Tensor, RunLayers]:
        """What the first layer reads, and what runs the layers."""
        part, forward, embed = self.part, self.part.forward, self.part.embed
        given = self._hidden[: layout.capacity.num_rows]
        if forward is not None:
            tokens, positions = layout.token_ids.long(), layout.positions.long()
            states = given if embed is None else forward.embedded(tokens, positions)
            return states, lambda states, span: forward.run(
                states, tokens, positions, attention, span, kept
            )
        states = given if embed is None else embed(layout.token_ids)
        rotations = self._rotary.look_up(self._tables, layout.positions)
        return states, lambda states, span: run_layers(
            part, states, layout.positions, rotations, attention, span=span
        )

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
