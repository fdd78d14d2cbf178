"""A tree in a layer that keeps a state, beside one in an attention layer.

    python -m draftline.benchmarks.step.recurrence

Milliseconds of one thread's CPU time, in float32, of the layers of Qwen3-Next without their
experts: a gated delta layer of 32 heads of 128 x 128 and attention of 16 heads of 256 behind a
context of 1,000 tokens, both 2,048 wide. Beside them the recurrence alone, by the CPU kernels and
by torch. The trees are random, of branches that go on from one of the last six nodes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextGatedDeltaNet,
    Qwen3NextRotaryEmbedding,
)

from ...core.steps import StepInput, TreeRows, prompt_step
from ...core.tree.tree import pack
from ...kernels.cpu.build import load_cpu_ops
from ...kernels.dispatch import load_recurrence
from ...models.attention.backend import NAME, attending
from ...models.attention.step_attention import PagedKv, SdpaBackend
from ...models.recurrence.modules import keep_in_pool, state_shape
from ...models.recurrence.state_pool import StatePool, StepStates, keeping
from ...models.stage.options import StageOptions

CONFIG: Any = AutoConfig.for_model("qwen3_next", attn_implementation=NAME)
CONTEXT, BLOCK_SIZE = 1000, 16
NODES = (1, 16, 64)
ROUNDS = 15
TITLES = "gated delta layer", "attention layer", "recurrence", "recurrence by torch"


def main(
    results: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    load_cpu_ops(Path(StageOptions().compile_cache).expanduser())
    found = {count: dict(zip(TITLES, measured(count), strict=True)) for count in NODES}
    table = Table("nodes", *(f"{title}, ms" for title in TITLES), box=None, pad_edge=False)
    for count, own in found.items():
        table.add_row(str(count), *(f"{ms:.2f}" for ms in own.values()))
    Console(width=110, highlight=False).print(table)
    if results is not None:
        results.write_text(json.dumps(found, indent=1) + "\n")


@torch.inference_mode()
def measured(count: int) -> list[float]:
    """Milliseconds of a tree of so many nodes, in the order of `TITLES`."""
    torch.manual_seed(count)
    rows = torch.randn(1, count, CONFIG.hidden_size)
    step = _tree(count)
    delta, pool = Qwen3NextGatedDeltaNet(CONFIG, 0).eval(), _pool("cpu_kernels")
    keep_in_pool(delta, 0)
    attention, attend = _attention(step)

    def run_delta() -> None:
        with keeping(pool.begin(pool.plan(step))):
            delta(rows)

    return [
        _best(run_delta),
        _best(lambda: attend(attention, rows)),
        *(_best(_recurrence(step, name)) for name in ("cpu_kernels", "walk")),
    ]


def _pool(recurrence: str) -> StatePool:
    """States of one layer and one request, whose text is long."""
    with torch.device("meta"):
        shape = state_shape(Qwen3NextGatedDeltaNet(CONFIG, 0), CONFIG.hidden_size)
    pool = StatePool([shape], 1, 256, BLOCK_SIZE, torch.empty(0), load_recurrence(recurrence))
    _scanned(pool.begin(pool.plan(prompt_step(CONTEXT, BLOCK_SIZE))), CONTEXT)()
    return pool


def _recurrence(step: StepInput, name: str) -> Callable[[], Tensor]:
    pool = _pool(name)
    return _scanned(pool.begin(pool.plan(step)), len(step.token_ids))


def _scanned(states: StepStates, count: int) -> Callable[[], Tensor]:
    """The recurrence of so many random rows."""
    heads, key_heads = CONFIG.linear_num_value_heads, CONFIG.linear_num_key_heads
    keys, queries = (
        torch.nn.functional.normalize(
            torch.randn(count, key_heads, CONFIG.linear_key_head_dim), dim=-1
        )
        for _ in range(2)
    )
    values = torch.randn(count, heads, CONFIG.linear_value_head_dim)
    decays, rates = -torch.rand(count, heads, 1), torch.rand(count, heads)
    return lambda: states.scan(0, queries, keys, values, decays, rates)


def _attention(
    step: StepInput,
) -> tuple[Qwen3NextAttention, Callable[[Qwen3NextAttention, Tensor], object]]:
    """A layer, and a call of it over a random cache."""
    attention = Qwen3NextAttention(CONFIG, 3).eval()
    object.__setattr__(attention, "draftline_layer", 0)
    num_slots = BLOCK_SIZE * step.block_tables.shape[1]
    kv = PagedKv(1, num_slots, CONFIG.num_key_value_heads, CONFIG.head_dim)
    kv.data.normal_()
    backend = SdpaBackend(kv, BLOCK_SIZE)
    positions = torch.from_numpy(step.positions)[None].long()
    turns = Qwen3NextRotaryEmbedding(CONFIG)(torch.empty(0), positions)

    def attend(layer: Qwen3NextAttention, rows: Tensor) -> None:
        with attending(backend.begin(step)):
            layer(rows, position_embeddings=turns, attention_mask=None)

    return attention, attend


def _tree(count: int) -> StepInput:
    """A step of a tree of so many nodes."""
    random = np.random.default_rng(count)
    sees = np.eye(count, dtype=np.bool_)
    for node in range(1, count):
        sees[node] |= sees[random.integers(max(0, node - 6), node)]
    positions = (CONTEXT - 1 + sees.sum(axis=1)).astype(np.int32)
    slots = np.arange(CONTEXT, CONTEXT + count, dtype=np.int32)
    return replace(
        prompt_step(count, BLOCK_SIZE),
        positions=positions,
        slots=slots,
        context_lens=np.array([CONTEXT], dtype=np.int32),
        block_tables=np.arange(-(-(CONTEXT + count) // BLOCK_SIZE), dtype=np.int32)[None],
        trees=(TreeRows(pack(sees), slots, positions),),
    )


def _best(work: Callable[[], object]) -> float:
    """Milliseconds of the fastest round, of this thread alone."""
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.thread_time()
        work()
        best = min(best, time.thread_time() - begin)
    return 1e3 * best


if __name__ == "__main__":
    typer.run(main)
