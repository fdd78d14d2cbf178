"""The implementation that computes a stage's attention, chosen once at the start."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...core.steps import StepInput
from ...kernels.attention.spec import AttentionShape
from ...kernels.dispatch import AttentionChoice, Machine, choose_attention, choose_for_fp8
from .kernel_attention import FlashBackend, KernelBackend, StepKernels, TileOptions
from .step_attention import PagedKv, StepAttention

NAME = "draftline"


class AttentionBackend(Protocol):
    """Computes attention over the stage's cache; keeps buffers that steps reuse."""

    def begin(self, step: StepInput) -> StepAttention | StepKernels:
        """Attention of this step. Invalidates the result of the previous call."""
        ...

    def move(self, moves: Tensor) -> None:
        """Copy slots in all layers; `moves` int64 [m, 2] (from, to). All are read first."""
        ...


class SdpaBackend:
    """torch's own attention (`step_attention.py`): the reference, and the backend on CPUs."""

    def __init__(self, kv: PagedKv, block_size: int) -> None:
        self._kv, self._block_size = kv, block_size

    def begin(self, step: StepInput) -> StepAttention:
        """Attention of this step, valid until the next call."""
        return StepAttention(step, self._kv, self._block_size)

    def move(self, moves: Tensor) -> None:
        """Copy slots in all layers; `moves` int64 [m, 2] (from, to). All are read first."""
        self._kv.move(moves)


def choose_backend(
    kv: PagedKv, dtype: torch.dtype, block_size: int, num_heads: int, wanted: str = "auto",
    *, tiles: TileOptions | None = None,
) -> tuple[AttentionBackend, AttentionChoice]:  # fmt: skip
    """The backend of a stage that computes in `dtype` with `num_heads` query heads a layer.

    `tiles` is for draftline's kernels. Raises `ConfigError` (`attention`, `kv_cache_dtype`) if the
    choice cannot run here.
    """
    machine = Machine.of(kv.data.device)
    if kv.scales is None:
        choice = choose_attention(machine, dtype, block_size, wanted)
    else:
        choice = choose_for_fp8(machine, wanted)
    if choice.name == "sdpa":
        return SdpaBackend(kv, block_size), choice
    shape = AttentionShape(num_heads, kv.data.shape[3], kv.data.shape[4])
    kind = FlashBackend if choice.name == "flash_attn" else KernelBackend
    return kind(kv, block_size, shape, tiles=tiles), choice


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: StepAttention | StepKernels, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Write the rows' KV, then attend over all that each row sees.

    `query` [1, heads, rows, head_dim]; `key` and `value` [1, kv_heads, rows, head_dim]; options
    `scaling`, `sliding_window` and `softcap` as the model gives them. The layers' attention mask
    argument carries the step itself: every model passes it on unchanged. Returns [1, rows, heads,
    head_dim].
    """
    step = attention_mask
    layer: int = module.draftline_layer  # pyright: ignore[reportAssignmentType]
    step.write_heads(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = step.attend(
        layer, query[0].transpose(0, 1), options["scaling"], options.get("sliding_window"),
        options.get("softcap"),
    )  # fmt: skip
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
