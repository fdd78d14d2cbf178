"""Loads a stage and chooses, once, whether CPU kernels, Triton kernels or torch compute it."""

from __future__ import annotations

from pathlib import Path

import torch

from ...core.errors import ConfigError
from ...core.progress import Progress, unseen
from ...kernels.dispatch import Machine
from ..attention.backend import choose_backend
from ..attention.kernel_attention import KernelBackend, TileOptions
from ..layers.experts import can_compute_experts, has_experts
from ..layers.model_slice import load_slice, with_pruned_head
from ..load.checkpoint import read_config, resolve_model_path
from ..load.partition import LayerSpan
from ..load.supported import keeps_states, naming, runs_by_layers
from .cpu_path import CpuPath, load_kernels_for, load_part_kernels
from .gpu_path import (
    CudaCapture,
    GraphPath,
    invariant_options,
    invariant_slice,
    uses_fused_modules,
)
from .gpu_start import CudaMemory, capture, fitting_blocks, warm_kernels
from .options import StageOptions
from .plain_path import ComputePath, HiddenStateTaps, PlainPath, make_kv, make_states
from .self_check import check_kind
from .stage import Stage
from .stage_heads import MakeHeads


def load_stage(
    model_path: str | Path, span: LayerSpan, num_blocks: int | None, block_size: int,
    dtype: str = "float32", *, device: str = "cpu",
    attention: str = "auto", options: StageOptions | None = None,
    make_heads: MakeHeads | None = None, progress: Progress = unseen,
) -> Stage:  # fmt: skip
    """Load the layers of `span` from a Hugging Face folder or hub id, with an empty KV cache.

    Here is decided how the stage computes, once. On a CPU the CPU kernels run the layers that they
    support, with `compile: auto`; the first start waits until they are compiled. On a GPU
    draftline's kernels run them, by CUDA graphs if `options.graphs` says so. Else torch does. Kinds
    of models of which more than the layers is needed run by transformers' own forward, once a small
    copy has shown that it gives the same (`self_check.py`).

    Without `num_blocks` the options limit how far the cache fills a GPU. `attention` is a shorthand
    for options with no other field. `make_heads` is for the last stage. Raises `CheckpointError`
    for a folder that cannot be used, `ConfigError` for a wrong setting.
    """
    options = options or StageOptions(attention=attention)
    _check_taps(options, span)
    config = read_config(model_path)
    if not runs_by_layers(config):
        with naming(resolve_model_path(model_path), config):
            check_kind(config)
    is_invariant = options.batch_invariant == "on" and torch.device(device).type != "cpu"
    if is_invariant:
        options = invariant_options(options, Machine.of(device))
    fused = uses_fused_modules(device, options.attention)
    by_cpu_kernels = load_kernels_for(config, dtype, torch.device(device), options, progress)
    mixes = (
        not runs_by_layers(config) and can_compute_experts(dtype, device) and has_experts(config)
    )
    has_part_kernels = (mixes or keeps_states(config)) and load_part_kernels(
        torch.device(device), options, progress
    )
    part = load_slice(
        model_path, span, dtype, device, options.quantization, fused=fused, keep=by_cpu_kernels,
        experts_by_kernels=mixes and has_part_kernels, progress=progress,
    )  # fmt: skip
    if options.output is not None:
        part = with_pruned_head(part, options.output.rows)
    if is_invariant:
        part = invariant_slice(part)
    states = make_states(
        part, options.max_requests + options.num_snapshots,
        options.max_rows + options.num_kept_rows, block_size, by_cpu_kernels=has_part_kernels,
    )  # fmt: skip
    taps = HiddenStateTaps(options.feature_layers, span, part.config.hidden_size)
    tiles = TileOptions(max_requests=options.max_requests, fixed_lines=is_invariant)

    def plain_path(num_blocks: int) -> PlainPath:
        kv = make_kv(part, num_blocks, block_size, options.kv_cache_dtype)
        num_heads = part.config.num_attention_heads
        wants_torch = part.forward is not None and part.forward.wants_torch
        wanted = "sdpa" if wants_torch else options.attention
        backend, _ = choose_backend(kv, part.dtype, block_size, num_heads, wanted, tiles=tiles)
        return PlainPath(part, kv, block_size, backend, taps, states)

    def stage_of(path: ComputePath) -> Stage:
        return Stage(path, make_heads, options.output)

    if num_blocks is None:
        num_blocks = fitting_blocks(
            lambda count: stage_of(plain_path(count)), block_size, options, CudaMemory(part.device)
        )
    path = plain_path(num_blocks)
    if by_cpu_kernels:
        return stage_of(CpuPath(part, path.kv, block_size, taps))
    if part.device.type != "cuda" or not isinstance(path.attention, KernelBackend):
        return stage_of(path)
    if options.graphs is None:
        stage = stage_of(path)
        warm_kernels(stage, path.attention.share, stage.vocab_size)
        return stage
    graphs = GraphPath(
        part, path.kv, block_size, path.attention, taps, options.graphs, CudaCapture(part.device),
        states,
    )  # fmt: skip
    stage = stage_of(graphs)
    warm_kernels(stage, path.attention.share, stage.vocab_size)
    capture(graphs)
    return stage


def _check_taps(options: StageOptions, span: LayerSpan) -> None:
    layers = options.feature_layers
    if any(not -1 <= layer < span.num_layers for layer in layers):
        raise ConfigError(
            "feature_layers",
            f"{list(layers)} are not layers of a model that has {span.num_layers}",
        )
