"""Steps of several requests that decode, and a tiny head that drafts at their end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from draftline.core.arrays import Int32
from draftline.core.proposals import FeatureLayers
from draftline.core.steps import (
    EVERY_LENGTH_BUCKET,
    HeadInput,
    HeadTask,
    SamplingRows,
    StepInput,
    StepTrees,
    prompt_step,
)
from draftline.core.tree.tree import pack
from draftline.drafters.heads.drafter import network_of
from draftline.drafters.heads.last_stage import LastStageHead, LastStageHeadSpec
from draftline.drafters.heads.options import HeadOptions
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.load_head import SharedParts
from draftline.models.load.model_info import ModelInfo
from draftline.models.stage.gpu_path import Capture
from draftline.models.stage.stage_heads import LastStageParts, StageHeads
from torch import nn

HIDDEN_SIZE, VOCAB_SIZE = 32, 64
NUM_NODES, NUM_ACCEPTED = 4, 2
CONTEXT_LEN, BLOCK_SIZE, NUM_STEPS = 128, 16, 60
NUM_ROWS = 1 + NUM_NODES


def stage_heads(num_slots: int, tree: str = "chain", capture: Capture | None = None) -> StageHeads:
    """One tiny head."""
    torch.manual_seed(0)
    config = FeatureHeadConfig(
        fusion="linear", hidden_size=HIDDEN_SIZE, intermediate_size=32, num_heads=1,
        num_kv_heads=1, head_dim=HIDDEN_SIZE, vocab_size=VOCAB_SIZE,
        feature_size=HIDDEN_SIZE,
    )  # fmt: skip
    embed = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE).requires_grad_(requires_grad=False)
    lm_head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False).requires_grad_(requires_grad=False)
    head = FeatureHead(config).eval().requires_grad_(requires_grad=False)
    info = ModelInfo(Path(), "none", VOCAB_SIZE, HIDDEN_SIZE, 1, 1, HIDDEN_SIZE, 4096, (), None)
    given = FeatureLayers((0,), HIDDEN_SIZE)
    spec = LastStageHeadSpec("head", Path(), info, given, HeadOptions(tree=tree), 16)
    parts = LastStageParts(
        embed, nn.Identity(), lm_head, None, torch.float32, torch.device("cpu"), num_slots,
        BLOCK_SIZE, capture,
    )  # fmt: skip
    shared = SharedParts(embed, nn.Identity(), lm_head, None)
    own = LastStageHead(spec, network_of(head, shared), (0,), parts)
    return StageHeads([own], features_of=lambda states: states)


def steps_of(num_requests: int) -> tuple[int, list[tuple[StepInput, Int32]]]:
    """Slots that they need, and steps of requests that decode with their target tokens."""
    last_len = CONTEXT_LEN + (1 + NUM_ACCEPTED) * NUM_STEPS + NUM_ROWS
    width = -(-last_len // BLOCK_SIZE)
    tables = np.arange(num_requests * width, dtype=np.int32).reshape(num_requests, width)
    places = tuple(range(num_requests))
    task = HeadTask("head", places, (1,) * len(places), (EVERY_LENGTH_BUCKET,) * len(places))
    rows = np.arange(num_requests * NUM_ROWS, dtype=np.int32)
    starts = np.arange(num_requests + 1, dtype=np.int32) * np.int32(NUM_ROWS)
    tokens = np.tile(np.arange(NUM_ROWS, dtype=np.int32), num_requests)
    # The token behind each node of a chain, but for the last one that is accepted.
    targets = tokens + 1
    targets[NUM_ACCEPTED::NUM_ROWS] = VOCAB_SIZE - 1
    masks = np.concatenate([pack(np.tri(NUM_ROWS, dtype=np.bool_)).ravel()] * num_requests)
    found = []
    for number in range(NUM_STEPS):
        context = np.full(num_requests, CONTEXT_LEN + (1 + NUM_ACCEPTED) * number, dtype=np.int32)
        positions = context.repeat(NUM_ROWS) + tokens
        slots = tables[rows // NUM_ROWS, positions // BLOCK_SIZE] * BLOCK_SIZE
        slots = (slots + positions % BLOCK_SIZE).astype(np.int32)
        step = replace(
            prompt_step(1, BLOCK_SIZE), step_id=number, token_ids=tokens, positions=positions,
            slots=slots, request_starts=starts, context_lens=context, block_tables=tables,
            trees=StepTrees(masks, starts, slots, positions, num_requests), logits_rows=rows,
            sampling=SamplingRows.greedy(positions.astype(np.int64) + 1),
            request_keys=tuple(range(num_requests)),
            heads=HeadInput(tasks=(task,), following_tokens=np.empty(0, dtype=np.int32)),
        )  # fmt: skip
        found.append((step, targets))
    return tables.size * BLOCK_SIZE, found
