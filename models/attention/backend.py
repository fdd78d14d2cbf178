"""The implementation that computes a stage's attention, chosen once at the start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...core.steps import StepInput
from ...kernels.attention.spec import AttentionShape
from ...kernels.dispatch import AttentionChoice, Machine, choose_attention, choose_for_fp8
from .kernel_attention import FlashBackend, KernelBackend, StepKernels, TileOptions
from .latent import latent_heads
from .step_attention import PagedKv, SdpaBackend, StepAttention

NAME = "draftline"


class AttentionBackend(Protocol):
    """Computes attention over the stage's cache; keeps buffers that steps reuse."""

    def begin(self, step: StepInput) -> StepAttention | StepKernels:
        """Attention of this step. Invalidates the result of the previous call."""
        ...

    def move(self, moves: Tensor) -> None:
        """Copy slots in all layers; `moves` int64 [m, 2] (from, to). All are read first."""
        ...


def choose_backend(
    kv: PagedKv, dtype: torch.dtype, block_size: int, num_heads: int, wanted: str = "auto",
    *, tiles: TileOptions | None = None,
) -> tuple[AttentionBackend, AttentionChoice]:  # fmt: skip
    """The backend of a stage that computes in `dtype` with `num_heads` query heads a layer.

    `tiles` is for draftline's kernels. Raises `ConfigError` (`attention`, `kv_cache_dtype`) if the
    choice cannot run here.
    """
    machine = Machine.of(kv.data.device)
    rotated = kv.rotated_dim
    if kv.scales is None:
        choice = choose_attention(machine, dtype, block_size, wanted, has_latents=rotated > 0)
    else:
        choice = choose_for_fp8(machine, wanted)
    if choice.name == "sdpa":
        return SdpaBackend(kv, block_size), choice
    num_kv_heads, key_dim = kv.data.shape[3:]
    if rotated:
        shape = AttentionShape.of_latents(num_heads, key_dim - rotated, rotated)
    else:
        shape = AttentionShape(num_heads, num_kv_heads, key_dim)
    kind = FlashBackend if choice.name == "flash_attn" else KernelBackend
    return kind(kv, block_size, shape, tiles=tiles), choice


_STEP: ContextVar[StepAttention | StepKernels] = ContextVar("draftline_step")
# What the interface passes that attention over a cache needs no part of.
WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "cache", "past_key_values"}


@contextmanager
def attending(attention: StepAttention | StepKernels) -> Iterator[None]:
    """A context in which transformers' layers attend by a step's attention."""
    token = _STEP.set(attention)
    try:
        yield
    finally:
        _STEP.reset(token)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: StepAttention | StepKernels | None, *, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Write the rows' KV, then attend over all that each row sees.

    `query` [1, heads, rows, head_dim]; `key` and `value` [1, kv_heads, rows, head_dim]; options
    as the model gives them. Of a module that keeps latents, `key` and `value` are one head of them
    (`latent.py`). `attention_mask` is the step's attention, or None within `attending`:
    a model's whole forward makes no mask for attention that it does not know. Returns
    [1, rows, heads, head_dim]. Raises `ValueError` for an option that it does not know.
    """
    if options.pop("is_causal", None) is False:
        raise ValueError("its attention is not causal")
    unknown = [
        name
        for name, value in options.items()
        if name not in WITHOUT_EFFECT and value is not None and value is not False
    ]
    if unknown:
        raise ValueError(f"its attention wants {', '.join(unknown)}")
    if key.shape[-1] != value.shape[-1]:
        raise ValueError("its keys and values differ in width")
    step = _STEP.get() if attention_mask is None else attention_mask
    layer: int = module.draftline_layer  # pyright: ignore[reportAssignmentType]
    step.write_heads(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if scaling is None:
        scaling = 1 / math.sqrt(query.shape[-1])
    latents = latent_heads(module)
    if latents is not None:
        query = latents.absorbed(query)
    rare: dict[str, Any] = {}
    if s_aux is not None:
        rare["sinks"] = s_aux
    if (chunk := _chunk_size(module)) is not None:
        rare["chunk"] = chunk
    # Of `SdpaBackend`, which models that want these have.
    assert not rare or isinstance(step, StepAttention)
    out = step.attend(layer, query[0].transpose(0, 1), scaling, sliding_window, softcap, **rare)
    if latents is not None:
        out = latents.expanded(out)
    return out.unsqueeze(0), None


def _chunk_size(module: Any) -> int | None:
    """Positions of a chunk, within which alone a layer attends; None: it attends beyond."""
    types = getattr(module.config, "layer_types", None)
    kind = None if types is None else types[module.layer_idx]
    if kind == "chunked_attention":
        return module.config.attention_chunk_size
    # A hybrid layer attends fully, beside what keeps its state.
    if kind not in (None, "full_attention", "sliding_attention", "hybrid"):
        raise ValueError(f"a layer of kind {kind!r}")
    return None


AttentionInterface.register(NAME, paged_attention)
