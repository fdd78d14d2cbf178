"""Stages of random weights, and the steps that they are measured with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ....core.arrays import Bool, Int32
from ....core.step.builder import kv_slots
from ....core.steps import SamplingRows, StepInput, TreeRows
from ....core.tree.tree import pack
from ....models.attention.backend import NAME as ATTENTION
from ....models.attention.backend import choose_backend
from ....models.attention.kernel_attention import TileOptions
from ....models.attention.step_attention import PagedKv
from ....models.layers.model_slice import ModelSlice, cut_slice
from ....models.load.model_info import kv_shape
from ....models.load.partition import LayerSpan
from ....models.stage.plain_path import PlainPath, make_states
from ....models.stage.stage import Stage
from ..plan import StepCase

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
        num_layers, num_slots, *kv_shape(config),
        dtype=dtype, device=str(device),
    )  # fmt: skip
    for layer in kv.layers:
        layer.normal_()
    return kv


def random_stage(
    part: ModelSlice, num_blocks: int, block_size: int, attention_backend: str,
    cases: tuple[StepCase, ...],
) -> tuple[Stage, str]:  # fmt: skip
    """A stage over a full cache, and which attention it uses, with the reason. It keeps states for
    the cases, where its layers have any.
    """
    kv = random_kv(
        part.config, part.num_kv_layers, num_blocks * block_size, part.dtype, part.device
    )  # fmt: skip
    num_heads = part.config.num_attention_heads
    backend, choice = choose_backend(
        kv, part.dtype, block_size, num_heads, attention_backend, tiles=TILES
    )
    most_requests = max(case.batch for case in cases)
    # Those of a step, and of the one before.
    most_rows = 2 * max(case.batch * case.rows_each for case in cases)
    states = make_states(part, most_requests, most_rows, block_size)
    path = PlainPath(part, kv, block_size, backend, states=states)
    return Stage(path), f"{choice.name} ({choice.reason})"


def _modules(whole: Any, span: LayerSpan) -> Iterator[nn.Module]:
    inner = whole.base_model
    yield from inner.layers[span.first : span.last]
    if span.is_first:
        yield inner.embed_tokens
    if span.is_last:
        yield inner.norm
        yield whole.lm_head


NONE = np.empty(0, dtype=np.int32)


def decode_step(case: StepCase, num_blocks: int, block_size: int, vocab_size: int) -> StepInput:
    """Greedy; the blocks of the requests lie anywhere in a cache of `num_blocks`, none twice."""
    rng = np.random.default_rng(0)
    rows_each, num_rows = case.rows_each, case.batch * case.rows_each
    width = case.num_slots(block_size) // block_size // case.batch
    blocks = rng.permutation(num_blocks)[: case.batch * width].astype(np.int32)
    tables = blocks.reshape(case.batch, width)
    visible = tree_mask(case.nodes)
    depths = visible.sum(axis=1, dtype=np.int32) - 1
    positions = case.context_len + depths
    slots = [_slots(table, case.context_len, rows_each, block_size) for table in tables]
    bits = pack(visible)
    all_positions = np.tile(positions, case.batch)
    return StepInput(
        step_id=0,
        moves=NONE.reshape(0, 2),
        token_ids=rng.integers(vocab_size, size=num_rows, dtype=np.int32),
        positions=all_positions,
        slots=np.concatenate(slots),
        request_starts=np.arange(case.batch + 1, dtype=np.int32) * rows_each,
        context_lens=np.full(case.batch, case.context_len, dtype=np.int32),
        block_tables=tables,
        trees=tuple(TreeRows(bits, own, positions) for own in slots),
        logits_rows=np.arange(num_rows, dtype=np.int32),
        sampling=SamplingRows.greedy(all_positions.astype(np.int64) + 1),
        state_slots=np.arange(case.batch, dtype=np.int32),
    )


def tree_mask(nodes: int) -> Bool:
    """Who sees whom in a root with a binary tree of `nodes` under it, [1 + nodes, 1 + nodes]."""
    visible = np.eye(1 + nodes, dtype=np.bool_)
    for row in range(1, 1 + nodes):
        visible[row] |= visible[(row - 1) // 2]
    return visible


def _slots(table: Int32, first: int, count: int, block_size: int) -> Int32:
    places = np.arange(first, first + count, dtype=np.int32)
    return kv_slots(table[None], np.zeros_like(places), places, block_size)
