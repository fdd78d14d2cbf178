"""Kinds of models that run by transformers' own forward: equal to it, or refused by name."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.load_stage import load_stage
from support.inputs.steps import BLOCK_SIZE, PagedRequest, Rows, make_step
from support.tools.tiny_models import EXPERTS, FORWARD_KINDS, SIZES, VOCAB_SIZE, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS = SIZES["num_hidden_layers"]
TEXT = np.random.default_rng(0).integers(2, VOCAB_SIZE, 18).astype(int).tolist()
NODES, PARENTS = [5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, -1, 4, 3]
PATH = [0, 1, 3, 6]
# Of logits up to 6, by sums in another order.
BOUND = 2e-4


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(PARENTS[node]), NODES[node]]


# One of each way in which kinds differ; the others are in the long run.
SHOWN = {
    "cohere2", "deepseek_v3", "ernie4_5_moe", "gemma4_text", "glm4", "gpt2", "gpt_neox",
    "gpt_oss", "granite", "granitemoehybrid", "kimi_linear", "lfm2", "llama4_text", "olmo3",
    "phi3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SHOWN else pytest.mark.full) for kind in FORWARD_KINDS],
)
def test_chunks_trees_and_moves_over_stages_give_the_logits_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(kind, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")

    def expected(*tokens: int) -> np.ndarray:
        with torch.no_grad():
            return peer(torch.tensor([[*TEXT, *tokens]])).logits[0].numpy()

    for bounds in ((0, LAYERS), (0, 1, LAYERS), (0, 1, 3, LAYERS)):
        spans = [LayerSpan(*pair, LAYERS) for pair in pairwise(bounds)]
        stages = [load_stage(folder, span, 40, BLOCK_SIZE) for span in spans]

        def logits(rows: Rows, moves: object = (), stages: object = stages) -> np.ndarray:
            step, hidden = make_step([rows], moves=moves), None
            for stage in stages[:-1]:
                hidden = stage.run(step, hidden)
            return stages[-1].logits(step, hidden, np.arange(len(step.token_ids))).numpy()

        request = PagedRequest([2, 9, 4, 1, 7, 12, 13])
        chunks = [logits(request.chunk(TEXT[:9], 0)), logits(request.chunk(TEXT[9:], 9))]
        np.testing.assert_allclose(np.concatenate(chunks), expected(), atol=BOUND)
        tree = logits(request.tree(NODES, PARENTS, 18))
        for node, row in enumerate(tree):
            np.testing.assert_allclose(row, expected(*path_to(node))[-1], atol=BOUND)
        nodes = request.slots(18, len(NODES))[PATH].tolist()
        moves = list(zip(nodes, request.slots(18, len(PATH)).tolist(), strict=True))
        after = logits(request.chunk([50, 51], 22), moves)
        np.testing.assert_allclose(after, expected(*path_to(6), 50, 51)[-2:], atol=BOUND)


# With attention or states of their own.
@pytest.mark.parametrize("kind", ["bloom", "deepseek_v32", "jamba", "mamba", "mpt", "xglm"])
def test_what_stages_would_compute_otherwise_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **EXPERTS, "kv_lora_rank": 8, "q_lora_rank": 8})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"model_type '{kind}' is not supported"):
        load_stage(tmp_path, LayerSpan(0, LAYERS, LAYERS), 40, BLOCK_SIZE)


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_next",
        "granitemoehybrid",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in ("qwen3_5_text", "olmo_hybrid", "falcon_h1", "nemotron_h", "lfm2")
        ),
    ],
)
def test_layers_that_keep_states_run_in_16_bits(kind: str, tmp_path: Path) -> None:
    folder, span = save_tiny_model(kind, tmp_path), LayerSpan(0, LAYERS, LAYERS)
    request, found = PagedRequest([2, 9, 4, 1, 7, 12, 13]), []
    for dtype in ("bfloat16", "float32"):
        stage = load_stage(folder, span, 40, BLOCK_SIZE, dtype)
        steps = [request.chunk(TEXT, 0), request.tree(NODES, PARENTS, 18)]
        nodes = request.slots(18, len(NODES))[PATH].tolist()
        moves = list(zip(nodes, request.slots(18, len(PATH)).tolist(), strict=True))
        logits = []
        for step in (*(make_step([rows]) for rows in steps),
                     make_step([request.chunk([50, 51], 22)], moves=moves)):  # fmt: skip
            logits.append(stage.logits(step, None, np.arange(len(step.token_ids))))
        found.append(torch.cat(logits))
    near, exact = found
    assert near.dtype == torch.float32
    # Logits of other paths differ by more than their own size.
    error = (near - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < 0.5
    assert error.mean() < 0.1
