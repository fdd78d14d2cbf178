"""What a stage on a GPU does before it serves.

It finds the size of its KV cache by running the largest step, runs every kernel once so that it is
compiled, and captures its graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...core.errors import ConfigError
from ...core.request.allowed_tokens import full_mask
from ...core.steps import (
    LogitEdits,
    LogProbInput,
    Penalties,
    SamplingRows,
    StepInput,
    TreeRows,
    prompt_step,
)
from ...core.tree.tree import pack
from ...kernels.attention.tile_plan import LEAST_SPLIT_OF_ONE_TILE, TILE_LINES
from ...kernels.device_tables import MOST_TABLE_BYTES, NUM_KINDS
from ...kernels.linear.reference import MOST_FEW_ROWS
from ...kernels.quantized.reference import MOST_QUANTIZED_ROWS
from .gpu_path import GraphPath, GraphReport
from .options import StageOptions
from .stage import Stage

GIB = 2**30
# Margin: allocations of odd sizes leave gaps, and CUDA graphs and kernels take driver memory. Also
# for tables of other sizes than that of the largest step.
SLACK_BYTES = GIB // 2 + NUM_KINDS * MOST_TABLE_BYTES

logger = logging.getLogger(__name__)


class CudaMemory:
    """Memory of a CUDA device, as torch and the driver count it; all in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin_peak(self) -> None:
        """Measure `peak` from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Peak bytes of this process's tensors since `begin_peak`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def allocated(self) -> int:
        """Bytes that this process's tensors take now."""
        return torch.cuda.memory_allocated(self._device)

    def free_and_total(self) -> tuple[int, int]:
        """Free and total bytes of the GPU, over all processes, after freeing cached memory."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Measured memory of a GPU that holds a stage's weights and a small KV cache; bytes.

    total, free  of the GPU, over all processes
    work         peak memory of a step besides weights and cache
    trial        size of the small cache
    states       of requests, in layers that keep any
    """

    total: int
    free: int
    work: int
    trial: int
    states: int = 0

    def room(self, utilization: float, num_works: int) -> int:
        """Bytes for the KV cache if a share `utilization` of the GPU may be used.

        `num_works` times the memory of a step is left free.
        """
        used = self.total - self.free - self.trial
        return int(self.total * utilization) - used - self.work * num_works - SLACK_BYTES


def fitting_blocks(
    stage_of: Callable[[int], Stage], block_size: int, options: StageOptions,
    memory: CudaMemory,
) -> int:  # fmt: skip
    """Number of KV blocks for which a GPU that holds the stage's weights has room.

    `stage_of` makes a trial stage with the given number of blocks.

    Raises `ConfigError` (`gpu_memory_utilization`) where there is room for none.
    """
    trial_blocks = -(-options.max_rows // block_size)
    use = profile(stage_of(trial_blocks), options.max_rows, memory)
    # Graphs hold the memory of a step in addition to that of steps without graphs.
    num_works = 1 if options.graphs is None else 2
    # A stage of layers that keep states alone has none.
    block_bytes = max(use.trial // trial_blocks, 1)
    return blocks_that_fit(use, block_bytes, options.gpu_memory_utilization, num_works)


def profile(stage: Stage, max_rows: int, memory: CudaMemory) -> MemoryUse:
    """Measure a step of `max_rows` prompt rows, each of which gets a target token."""
    hidden = None if stage.is_first else stage.empty_hidden(max_rows)
    resting = memory.allocated()
    memory.begin_peak()
    stage.run(prompt_step(max_rows, stage.block_size), hidden)
    work = memory.peak() - resting
    free, total = memory.free_and_total()
    return MemoryUse(total, free, work, stage.memory.kv, stage.memory.states)


def blocks_that_fit(use: MemoryUse, block_bytes: int, utilization: float, num_works: int) -> int:
    """Number of blocks of `block_bytes` that fit. Raises `ConfigError` where none does."""
    room = use.room(utilization, num_works)
    if room < block_bytes:
        taken = use.total - use.free - use.trial
        raise ConfigError(
            "gpu_memory_utilization",
            f"of {utilization:g} leaves no room for a KV cache: of {use.total / GIB:.1f} GiB, "
            f"{taken / GIB:.1f} are taken{_of_states(use.states)} and a step takes "
            f"{use.work / GIB:.1f}; raise it, lower max_num_batched_tokens"
            f"{' or max_num_seqs' if use.states else ''}, or cut the model into more stages",
        )
    num_blocks = room // block_bytes
    logger.info(
        "event=kv_cache_sized blocks=%d gib=%.2f step_gib=%.2f total_gib=%.1f",
        num_blocks, num_blocks * block_bytes / GIB, use.work / GIB, use.total / GIB,
    )  # fmt: skip
    return num_blocks


def _of_states(num_bytes: int) -> str:
    return f", {num_bytes / GIB:.1f} of these by states of max_num_seqs," if num_bytes else ""


# Numbers of rows: one for each tile size of products, and one for the library's products.
ROWS_OF_PRODUCTS = (1, 17, 33, MOST_FEW_ROWS + 1, MOST_QUANTIZED_ROWS + 1)


def warm_kernels(stage: Stage, share: int, vocab_size: int) -> None:
    """Run a step for every kernel that serving may use, then clear the KV cache and states.

    Triton takes seconds to compile a kernel at its first launch, which must not delay a request.

    share  query heads of a key/value head

    Raises the errors of `run`.
    """
    steps = list(_kernel_steps(stage, share, vocab_size))
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(steps))
        for name, step in steps:
            count = len(step.token_ids)
            stage.run(step, None if stage.is_first else stage.empty_hidden(count))
            progress.update(task, advance=1, description=f"compiled {name}")
    stage.reset()


def _kernel_steps(stage: Stage, share: int, vocab_size: int) -> Iterator[tuple[str, StepInput]]:
    block_size, num_slots = stage.block_size, stage.kv.num_slots
    rows = {*ROWS_OF_PRODUCTS, *(max(lines // share, 1) for lines in TILE_LINES)}
    for count in sorted(rows):
        if count <= num_slots:
            yield f"for {count} rows", prompt_step(count, block_size)
    # Where layers keep states, text that no step computed goes on from the state of a slot.
    one = replace(prompt_step(1, block_size), state_loads=np.zeros((1, 2), dtype=np.int32))
    own = TreeRows(pack(np.ones((1, 1), dtype=np.bool_)), one.slots, one.positions)
    yield "for trees", replace(one, trees=(own,))
    context = 2 * LEAST_SPLIT_OF_ONE_TILE
    if context < num_slots:
        yield "for contexts that are split", _behind(one, context, block_size)
    yield "for moves of keys", replace(one, moves=np.zeros((1, 2), dtype=np.int32))
    edits = (_edits(vocab_size),)
    for name, top_k in (("for filters and edits of logits", 2), ("for temperatures", 0)):
        sampling, wanted = _sampled(one.sampling, top_k), LogProbInput(of_targets=True)
        yield name, replace(one, sampling=sampling, edits=edits, log_probs=wanted)


def _behind(step: StepInput, context: int, block_size: int) -> StepInput:
    """A step of one row after a context of this length, in the first blocks."""
    place = np.array([context], dtype=np.int32)
    tables = np.arange(context // block_size + 1, dtype=np.int32)[None]
    return replace(step, positions=place, slots=place, context_lens=place, block_tables=tables)


def _sampled(greedy: SamplingRows, top_k: int) -> SamplingRows:
    ones = np.ones(len(greedy.position), dtype=np.float32)
    if not top_k:
        return replace(greedy, temperature=ones)
    return replace(
        greedy, temperature=ones, top_k=greedy.top_k + np.int32(top_k),
        top_p=ones * np.float32(0.9), min_p=ones * np.float32(0.01),
    )  # fmt: skip


def _edits(vocab_size: int) -> LogitEdits:
    first = np.zeros(1, dtype=np.int32)
    penalties = Penalties(
        first, first, np.zeros(1, dtype=np.bool_), first, first,
        repetition=1.1, presence=0.1, frequency=0.1,
    )  # fmt: skip
    bias = np.zeros(1, dtype=np.float32)
    return LogitEdits(0, 1, first, bias, penalties, full_mask(vocab_size)[None])


def capture(path: GraphPath) -> GraphReport:
    """Capture the CUDA graphs of a stage, the largest first."""
    with _progress() as progress:
        task = progress.add_task("capturing", total=len(path.rows) + len(path.narrow_rows))

        def show(rows: int) -> None:
            progress.update(task, advance=1, description=f"captured at {rows} rows")

        return path.capture_all(time.monotonic, show)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
