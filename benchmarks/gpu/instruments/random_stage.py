"""A stage of random weights, made on its device: no checkpoint of that size is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ....models.attention.backend import NAME as ATTENTION
from ....models.attention.backend import choose_backend
from ....models.attention.kernel_attention import TileOptions
from ....models.attention.step_attention import PagedKv
from ....models.layers.model_slice import ModelSlice, cut_slice
from ....models.load.model_info import head_dim, num_kv_heads
from ....models.load.partition import LayerSpan
from ....models.stage.stage import Stage

# Of fresh models; with it hidden states stay of the size of 1 through any number of layers.
SPREAD = 0.02
# Of a server for the largest batch that is measured.
TILES = TileOptions(max_requests=64)


def random_slice(
    config: PretrainedConfig, span: LayerSpan, dtype: torch.dtype, device: torch.device,
    *, fused: bool,
) -> ModelSlice:  # fmt: skip
    """The modules of `span`, as `load_slice` gives them; matrices are noise, vectors are ones."""
    with init_empty_weights(include_buffers=False):
        whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for module in _modules(whole, span):
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                values = torch.empty(parameter.shape, dtype=dtype, device=device)
                values = values.fill_(1.0) if values.ndim == 1 else values.normal_(std=SPREAD)
                setattr(owner, name, nn.Parameter(values, requires_grad=False))
    return cut_slice(whole.eval(), span, dtype, device, fused=fused)


def random_kv(
    config: PretrainedConfig, num_layers: int, num_slots: int,
    dtype: torch.dtype, device: torch.device,
) -> PagedKv:  # fmt: skip
    """A cache full of noise: kernels run faster over zeros."""
    kv = PagedKv(
        num_layers, num_slots, num_kv_heads(config), head_dim(config),
        dtype=dtype, device=str(device),
    )  # fmt: skip
    for layer in kv.layers:
        layer.normal_()
    return kv


def random_stage(
    part: ModelSlice, num_blocks: int, block_size: int, attention_backend: str
) -> tuple[Stage, str]:
    """A stage over a full cache, and which attention it uses, with the reason."""
    kv = random_kv(
        part.config, len(part.layers), num_blocks * block_size, part.dtype, part.device
    )  # fmt: skip
    num_heads = part.config.num_attention_heads
    backend, choice = choose_backend(
        kv, part.dtype, block_size, num_heads, attention_backend, tiles=TILES
    )
    return Stage(part, kv, block_size, attention=backend), f"{choice.name} ({choice.reason})"


def _modules(whole: Any, span: LayerSpan) -> Iterator[nn.Module]:
    inner = whole.base_model
    yield from inner.layers[span.first : span.last]
    if span.is_first:
        yield inner.embed_tokens
    if span.is_last:
        yield inner.norm
        yield whole.lm_head
