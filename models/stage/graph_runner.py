"""A stage's layers as CUDA graphs: one launch a step where there were hundreds.

A graph is captured for each of some numbers of rows and serves every step that has no more: rows
beyond the step's write nowhere and see nothing. Their results are never read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...core.steps import StepInput
from ...kernels.attention.layout_capacity import LayoutCapacity
from ...kernels.attention.step_layout import StepLayout
from ..attention.kernel_attention import KernelBackend
from ..layers.fast_modules import RotaryTable
from ..layers.model_slice import ModelSlice, run_layers
from .feature_taps import FeatureTaps
from .options import GraphOptions

Work = Callable[[], None]
# Larger steps keep a GPU busy for longer than their launches take.
MOST_ROWS = 512
SMALL_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
ROWS_STEP = 128
# Words of ancestor bits a row: trees of 512 columns.
MOST_WORDS = 8
# Own columns beyond two a row: nodes in flight of the smallest steps.
SPARE_COLUMNS = 64
logger = logging.getLogger(__name__)


class Capture(Protocol):
    """Makes work replayable. The work reads and writes tensors that stay where they are."""

    def __call__(self, work: Work) -> Work:
        """What does the work again, without Python; `work` is done at least once meanwhile.

        What `work` leaves in memory that it allocated is valid until the next replay of any.
        """
        ...


class CudaCapture:
    """Captures CUDA graphs on a stream of its own; all share the memory between their layers."""

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
            # Other threads, of drafters say, may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What was captured: rows of each graph, largest first, and those given up for lack of time."""

    captured: tuple[int, ...]
    given_up: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _StepGraph:
    """A graph: what it reads besides the cache and the hidden states, and how to run it."""

    layout: StepLayout
    replay: Work


class GraphRunner:
    """Runs steps that fit a captured graph. `capture_all` comes first.

    Steps are described and launched without waiting for the device; a result is valid until the
    next step runs.
    """

    def __init__(  # noqa: PLR0917 - parts of one stage
        self, part: ModelSlice, rotary: RotaryTable, backend: KernelBackend, taps: FeatureTaps,
        options: GraphOptions, capture: Capture,
    ) -> None:  # fmt: skip
        self._taps = taps
        self._part, self._rotary, self._backend = part, rotary, backend
        self._options, self._capture = options, capture
        self.rows = rows_of_graphs(options.max_rows)
        rotary.reserve(options.max_positions)
        # Graphs read these very tensors, which the table would give up if it grew.
        self._tables = rotary.tables
        like = torch.empty(self.rows[-1], 0, dtype=part.dtype, device=part.device)
        self._hidden = like.new_zeros(self.rows[-1], taps.input_size)
        self._out = like.new_zeros(self.rows[-1], taps.output_size)
        # Zeros at first, so that rows of no request never hold what was never computed.
        self._attended = backend.empty_out(self.rows[-1], part.dtype)
        # Smallest first.
        self._graphs: list[_StepGraph] = []

    @torch.inference_mode()
    def capture_all(
        self, clock: Callable[[], float], on_progress: Callable[[int], None] = lambda _: None
    ) -> GraphReport:
        """Capture the largest first, whose memory serves all; `on_progress` gets each's rows."""
        start = clock()
        captured: list[int] = []
        for rows in reversed(self.rows):
            if captured and clock() - start > self._options.seconds:
                break
            self._graphs.insert(0, self._captured(rows))
            captured.append(rows)
            on_progress(rows)
        given_up = tuple(rows for rows in reversed(self.rows) if rows not in captured)
        report = GraphReport(tuple(captured), given_up, clock() - start)
        logger.info(
            "event=graphs_captured graphs=%d largest_rows=%d given_up=%d seconds=%.1f",
            len(captured), captured[0], len(given_up), report.seconds,
        )  # fmt: skip
        return report

    def run(self, step: StepInput, hidden: Tensor | None) -> Tensor | None:
        """Hidden states [rows, output_size] of the taps; None: no graph holds the step.

        `hidden` is that of the stage before; None on the first. KV moves are not done here.
        """
        graph = self._find(step)
        if graph is None:
            return None
        num_rows = len(step.token_ids)
        graph.layout.refill(step)
        if hidden is not None:
            self._hidden[:num_rows].copy_(hidden, non_blocking=True)
        graph.replay()
        return self._out[:num_rows]

    def _find(self, step: StepInput) -> _StepGraph | None:
        if not len(step.token_ids) or int(step.positions.max()) >= self._options.max_positions:
            return None
        needed = LayoutCapacity.exact(step, self._backend.block_size)
        return next((graph for graph in self._graphs if graph.layout.capacity.holds(needed)), None)

    def _captured(self, rows: int) -> _StepGraph:
        layout = self._backend.static_layout(self._capacity(rows))
        attention = self._backend.begin_static(layout, self._attended[:rows])
        part = self._part

        def work() -> None:
            embed = part.embed
            states = self._hidden[:rows] if embed is None else embed(layout.token_ids)
            rotations = self._rotary.look_up(self._tables, layout.positions)
            self._out[:rows].copy_(
                self._taps.run(
                    states,
                    lambda states, span: run_layers(
                        part, states, layout.positions, rotations, attention, span=span
                    ),
                )
            )

        return _StepGraph(layout, self._capture(work))

    def _capacity(self, rows: int) -> LayoutCapacity:
        requests = min(rows, self._options.max_requests)
        block_size = self._backend.block_size
        blocks_of_one = -(-self._options.max_positions // block_size)
        # Requests may share blocks, which every table of theirs names.
        num_blocks = min(requests * blocks_of_one, 2 * self._backend.kv.num_slots // block_size)
        columns = 2 * rows + SPARE_COLUMNS
        words = min(-(-columns // 64), MOST_WORDS)
        return LayoutCapacity(rows, requests, columns, num_blocks, words)


def rows_of_graphs(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, ascending, where steps have up to `max_rows`."""
    largest = min(max_rows, MOST_ROWS)
    wanted = (*SMALL_ROWS, *range(2 * ROWS_STEP, MOST_ROWS + 1, ROWS_STEP))
    return (*(rows for rows in wanted if rows < largest), largest)
