"""How long a stage's step takes beside transformers' own forward, on one thread.

Random weights of the demo models' shapes; both read a cache of 128 tokens. Run:
`python -m draftline.benchmarks.step.stage_step`
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from ...core.steps import SamplingRows, StepInput, TreeRows
from ...core.tree.kernels import pack
from ...models.load.partition import LayerSpan
from ...models.stage.stage import Stage, load_stage

CONTEXT_LEN = 128
BLOCK_SIZE = 16
NUM_BLOCKS = 32
ROWS = (1, 2, 4, 8, 16)
REPEATS = 100
SHAPES: dict[str, dict[str, Any]] = {
    "target": {
        "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 688,
    },
    "drafter": {
        "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "intermediate_size": 256,
    },
}  # fmt: skip


def main() -> None:
    """Print a table of median milliseconds."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    print(f"median ms of {REPEATS} steps, {CONTEXT_LEN} cached tokens, one thread, float32")
    print(f"{'model':10}{'who':28}" + "".join(f"{rows:>8}" for rows in ROWS))
    for name, shape in SHAPES.items():
        config = LlamaConfig(
            **shape, vocab_size=4096, max_position_embeddings=1024, tie_word_embeddings=True
        )
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            peer = LlamaForCausalLM(config).eval()
            peer.save_pretrained(folder)
            num_layers = config.num_hidden_layers
            stage = load_stage(
                Path(folder), LayerSpan(0, num_layers, num_layers), NUM_BLOCKS, BLOCK_SIZE
            )
            _report(name, "transformers, eager", lambda rows, p=peer: _peer_step(p, rows))
            for label, temperature in (("draftline, greedy", 0.0), ("draftline, sampled", 0.8)):
                step = _step_maker(stage, temperature)
                _report(name, label, step)


def _report(model: str, who: str, prepare: Callable[[int], Callable[[], object]]) -> None:
    medians = [_median_ms(prepare(rows)) for rows in ROWS]
    print(f"{model:10}{who:28}" + "".join(f"{median:8.2f}" for median in medians), flush=True)


def _median_ms(run: Callable[[], object]) -> float:
    for _ in range(REPEATS // 5):
        run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _peer_step(peer: LlamaForCausalLM, num_rows: int) -> Callable[[], object]:
    """The forward that `generate` calls; the cache is cut back after each step, as it does."""
    cache = DynamicCache(config=peer.config)
    peer(torch.arange(CONTEXT_LEN)[None], past_key_values=cache)
    tokens = torch.arange(num_rows)[None]

    def run() -> object:
        answer = peer(tokens, past_key_values=cache).logits.argmax(-1).tolist()
        cache.crop(-num_rows)
        return answer

    return run


def _step_maker(stage: Stage, temperature: float) -> Callable[[int], Callable[[], object]]:
    def prepare(num_rows: int) -> Callable[[], object]:
        step = tree_step(num_rows, temperature)
        return lambda: stage.run(step, None)

    return prepare


def tree_step(num_rows: int, temperature: float) -> StepInput:
    """A chain of `num_rows` nodes after the context: what a verification pass is."""
    none = np.empty(0, dtype=np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    positions = CONTEXT_LEN + rows
    temperatures = np.full(num_rows, temperature, dtype=np.float32)
    sampling = SamplingRows.unfiltered(
        temperatures, np.full(num_rows, 7), positions.astype(np.int64) + 1
    )
    return StepInput(
        step_id=0, moves=none.reshape(0, 2), token_ids=rows, positions=positions, slots=positions,
        request_starts=np.array([0, num_rows], dtype=np.int32),
        context_lens=np.array([CONTEXT_LEN], dtype=np.int32),
        block_tables=np.arange(-(-CONTEXT_LEN // BLOCK_SIZE), dtype=np.int32)[None],
        trees=(TreeRows(pack(np.tri(num_rows, dtype=np.bool_)), positions, positions),),
        logits_rows=rows, sampling=sampling, probe_rows=none, probe_top_k=0, scored_rows=none,
        scored_tokens=none,
    )  # fmt: skip


if __name__ == "__main__":
    main()
