"""A stage's KV cache, and its number of blocks on a GPU, found by running the largest step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.steps import StepInput, prompt_step
from ...kernels.recent_tables import MOST_TABLE_BYTES, NUM_KINDS
from ..attention.step_attention import PagedKv
from ..layers.model_slice import ModelSlice
from ..load.model_info import head_dim, num_kv_heads
from .options import StageOptions

GIB = 2**30
# Margin: allocations of odd sizes leave gaps, and CUDA graphs and kernels take driver memory. Also
# for tables of other sizes than that of the largest step.
SLACK_BYTES = GIB // 2 + NUM_KINDS * MOST_TABLE_BYTES

logger = logging.getLogger(__name__)
KvCacheDtype = Literal["auto", "fp8"]
FP8 = torch.float8_e4m3fn


class DeviceMemory(Protocol):
    """A GPU's memory; all in bytes."""

    def begin_peak(self) -> None:
        """Measure `peak` from now on."""
        ...

    def peak(self) -> int:
        """Peak bytes of this process's tensors since `begin_peak`."""
        ...

    def allocated(self) -> int:
        """Bytes that this process's tensors take now."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Free and total memory of the GPU, over all processes, after freeing this one's cached
        memory."""
        ...


class CudaMemory:
    """Memory of a CUDA device, as torch and the driver count it."""

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
    """

    total: int
    free: int
    work: int
    trial: int

    def room(self, utilization: float, num_works: int) -> int:
        """Bytes for the KV cache if a share `utilization` of the GPU may be used.

        `num_works` times the memory of a step is left free.
        """
        used = self.total - self.free - self.trial
        return int(self.total * utilization) - used - self.work * num_works - SLACK_BYTES


def fitting_blocks(
    stage_of: Callable[[int], TrialStage], block_size: int, options: StageOptions,
    memory: DeviceMemory,
) -> int:  # fmt: skip
    """Number of KV blocks for which a GPU that holds the stage's weights has room.

    `stage_of` makes a trial stage with the given number of blocks.

    Raises `ConfigError` (`gpu_memory_utilization`) where there is room for none.
    """
    trial_blocks = -(-options.max_rows // block_size)
    use = profile(stage_of(trial_blocks), options.max_rows, memory)
    # Graphs hold the memory of a step in addition to that of steps without graphs.
    num_works = 1 if options.graphs is None else 2
    block_bytes = use.trial // trial_blocks
    return blocks_that_fit(use, block_bytes, options.gpu_memory_utilization, num_works)


def profile(stage: TrialStage, max_rows: int, memory: DeviceMemory) -> MemoryUse:
    """Measure a step of `max_rows` prompt rows, each of which gets a target token."""
    hidden = None if stage.is_first else stage.empty_hidden(max_rows)
    resting = memory.allocated()
    memory.begin_peak()
    stage.run(prompt_step(max_rows, stage.block_size), hidden)
    work = memory.peak() - resting
    free, total = memory.free_and_total()
    return MemoryUse(total, free, work, stage.kv_bytes)


def blocks_that_fit(use: MemoryUse, block_bytes: int, utilization: float, num_works: int) -> int:
    """Number of blocks of `block_bytes` that fit. Raises `ConfigError` where none does."""
    room = use.room(utilization, num_works)
    if room < block_bytes:
        taken = use.total - use.free - use.trial
        raise ConfigError(
            "gpu_memory_utilization",
            f"of {utilization:g} leaves no room for a KV cache: of {use.total / GIB:.1f} GiB, "
            f"{taken / GIB:.1f} are taken and a step takes {use.work / GIB:.1f}; raise it, "
            "lower max_num_batched_tokens, or cut the model into more stages",
        )
    num_blocks = room // block_bytes
    logger.info(
        "event=kv_cache_sized blocks=%d gib=%.2f step_gib=%.2f total_gib=%.1f",
        num_blocks, num_blocks * block_bytes / GIB, use.work / GIB, use.total / GIB,
    )  # fmt: skip
    return num_blocks


def make_kv(
    part: ModelSlice, num_blocks: int, block_size: int, kv_cache_dtype: str = "auto"
) -> PagedKv:
    """An empty cache, in the stage's dtype or in FP8. FP8 uses the checkpoint's calibrated scales,
    or without these a scale for every row.

    Raises `ConfigError` (`kv_cache_dtype`).
    """
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ConfigError("kv_cache_dtype", f"must be auto or fp8, not {kv_cache_dtype!r}")
    heads, dim = num_kv_heads(part.config), head_dim(part.config)
    dtype, scales = part.dtype, None
    if kv_cache_dtype == "fp8":
        dtype, scales = FP8, part.kv_scales
        if scales is None:
            size = (len(part.layers), num_blocks * block_size, 2, heads)
            scales = torch.ones(size, device=part.device)
    return PagedKv(
        len(part.layers), num_blocks * block_size, heads, dim,
        dtype=dtype, device=str(part.device), scales=scales,
    )  # fmt: skip


class TrialStage(Protocol):
    """A stage that can run trial steps."""

    @property
    def kv(self) -> PagedKv:
        """Its KV cache."""
        ...

    @property
    def block_size(self) -> int:
        """Slots of a block of the cache."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of its KV cache, with those of heads."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        ...

    def empty_hidden(self, num_rows: int) -> Tensor:
        """Zeros in the shape of the hidden states that `run` takes where it embeds no tokens."""
        ...

    def run(self, step: StepInput, hidden: Tensor | None = None) -> object:
        """Runs one step."""
        ...
