"""Scores of documents equal transformers' own log-probabilities, whatever shares a step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.pipeline.scorer import PipelineScorer
from draftline.models.load.partition import partition_layers
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

BLOCK_SIZE, NUM_BLOCKS = 4, 32


@pytest.mark.parametrize(
    ("kind", "max_rows", "max_documents"),
    [("llama", 48, 9), ("llama", 128, 9), ("qwen3_next", 128, 2)],
)
def test_log_probabilities(tmp_path: Path, kind: str, max_rows: int, max_documents: int) -> None:
    folder = save_tiny_model(kind, tmp_path)
    options = StageOptions(max_requests=max_documents, max_rows=max_rows)
    stages = [
        load_stage(folder, span, NUM_BLOCKS, BLOCK_SIZE, options=options)
        for span in partition_layers(folder, 2)
    ]
    pipeline = LocalPipeline(stages)
    asyncio.run(pipeline.start())
    rng = np.random.default_rng(0)
    documents = [
        rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (30, 1, 7, 44, 2, 19)
    ]
    scorer = PipelineScorer(pipeline, NUM_BLOCKS, BLOCK_SIZE, max_rows, max_documents)
    found = scorer.log_probs(documents)
    peer = AutoModelForCausalLM.from_pretrained(folder)
    for document, own in zip(documents, found, strict=True):
        ids = torch.from_numpy(document.astype(np.int64))[None]
        with torch.inference_mode():
            log_probs = peer(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        expected = log_probs.gather(1, ids[0, 1:, None])[:, 0]
        assert own.shape == (len(document) - 1,)
        assert own == pytest.approx(expected.numpy(), abs=1e-4)
