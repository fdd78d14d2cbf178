"""Makes a stage's KV cache as its settings say."""

from __future__ import annotations

from typing import Literal

import torch

from ...core.errors import ConfigError
from ..attention.paged_kv import PagedKv
from ..layers.model_slice import ModelSlice
from ..load.model_info import head_dim, num_kv_heads

KvCacheDtype = Literal["auto", "fp8"]
FP8 = torch.float8_e4m3fn


def make_kv(
    part: ModelSlice, num_blocks: int, block_size: int, kv_cache_dtype: str = "auto"
) -> PagedKv:
    """An empty cache, in the stage's own number format or in FP8 at a scale of 1.

    Raises `ConfigError` (`kv_cache_dtype`).
    """
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ConfigError("kv_cache_dtype", f"must be auto or fp8, not {kv_cache_dtype!r}")
    heads, dim = num_kv_heads(part.config), head_dim(part.config)
    dtype, scales = part.dtype, None
    if kv_cache_dtype == "fp8":
        dtype = FP8
        scales = torch.ones(len(part.layers), 2, heads, device=part.device)
    return PagedKv(
        len(part.layers), num_blocks * block_size, heads, dim,
        dtype=dtype, device=str(part.device), scales=scales,
    )  # fmt: skip
