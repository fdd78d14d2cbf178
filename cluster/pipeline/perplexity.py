"""A target's perplexity of a text, with the layers of one stage at a time in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ...core.arrays import Int32
from ...core.progress import Progress, unseen
from ...core.steps import StepOutput
from ...models.layers.weight_memory import read_weight_memory
from ...models.load.partition import partition_layers
from ...models.stage.load_stage import load_stage
from ...models.stage.options import StageOptions
from .scorer import build_scoring_step

BLOCK_SIZE = 16
# Weights in memory at once, but for a layer that takes more.
MOST_BYTES = 2 << 30


def perplexity(
    model: str | Path, documents: Sequence[Int32], device: str, dtype: str,
    quantization: str = "none", progress: Progress = unseen,
) -> float:  # fmt: skip
    """Of all tokens but the first of each document, given those before it.

    One step computes all of them, stage by stage: a stage is loaded, computes, and is freed. Raises
    `CheckpointError`, and `ConfigError` for an unknown quantization.
    """
    step = build_scoring_step(0, documents, BLOCK_SIZE)
    num_blocks = sum(-(-len(document) // BLOCK_SIZE) for document in documents)
    options = StageOptions(
        compile="auto", quantization=quantization, max_rows=len(step.token_ids),
        max_requests=len(documents),
    )  # fmt: skip
    size = read_weight_memory(model, device, dtype).num_bytes()
    most_stages = partition_layers(model, 1)[0].num_layers
    hidden: torch.Tensor | StepOutput | None = None
    for span in partition_layers(model, min(most_stages, 1 + size // MOST_BYTES)):
        stage = load_stage(
            model, span, num_blocks, BLOCK_SIZE, dtype, device=device, options=options,
            progress=progress,
        )  # fmt: skip
        assert not isinstance(hidden, StepOutput)
        hidden = stage.run(step, hidden)
        del stage
    assert isinstance(hidden, StepOutput)
    scores = hidden.log_probs.scores
    assert scores is not None
    return math.exp(-float(scores.mean(dtype="float64")))
