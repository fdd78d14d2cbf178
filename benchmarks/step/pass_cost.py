"""What one pass of a stage costs, by rows and context, for several ways of computing it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...models.attention.step_attention import PagedKv
from ...models.layers.compiled_layers import CompiledLayers, prepare
from ...models.layers.model_slice import load_slice
from ...models.load.model_info import head_dim, num_kv_heads
from ...models.load.partition import LayerSpan
from ...models.stage.stage import Stage
from ...models.stage.warm_up import warm_up
from .stage_step import BLOCK_SIZE, tree_step

NUM_SLOTS = 1024
# 45 million parameters, the embeddings of 16,384 tokens included.
RANDOM_MODEL = LlamaConfig(
    hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=1792, vocab_size=16384, max_position_embeddings=NUM_SLOTS,
    tie_word_embeddings=False,
)  # fmt: skip
VARIANTS = ("eager", "compiled", "compiled, C++ wrapper")

# Times a pass of (rows, context) once, in seconds.
Pass = Callable[[int, int], float]


@contextmanager
def random_checkpoint() -> Iterator[Path]:
    """A folder with random weights of `RANDOM_MODEL`."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(RANDOM_MODEL).save_pretrained(folder)
        yield Path(folder)


def stage_pass(checkpoint: Path, variant: str, cache: str) -> tuple[Pass, float]:
    """One of `VARIANTS`, and the seconds that it took to be ready."""
    start = time.perf_counter()
    config = LlamaConfig.from_pretrained(checkpoint)
    num_layers = config.num_hidden_layers
    part = load_slice(checkpoint, LayerSpan(0, num_layers, num_layers))
    kv = PagedKv(num_layers, NUM_SLOTS, num_kv_heads(config), head_dim(config))
    compiled = None
    if variant != "eager":
        part = prepare(part, cache)
        compiled = CompiledLayers(part, cpp_wrapper=variant.endswith("wrapper"))
    stage = Stage(part, kv, BLOCK_SIZE, compiled)
    warm_up(stage)

    def run(rows: int, context: int) -> float:
        step = tree_step(rows, 0.0, context)
        begin = time.perf_counter()
        stage.run(step)
        return time.perf_counter() - begin

    return run, time.perf_counter() - start
