"""Steps of prompt chunks alone, for those that use a pipeline without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.arrays import Int32
from ...core.kv_cache import NO_MOVES
from ...core.step.builder import block_tables
from ...core.steps import (
    NO_HEADS,
    NO_LOG_PROBS,
    NO_ROWS,
    HeadInput,
    LogProbInput,
    SamplingRows,
    StepInput,
)


class TextChunk(NamedTuple):
    """Consecutive tokens of a text, which has no other chunk in the same step.

    tokens  int32 [rows]
    start   position of the first; the KV of those before it is in the cache
    blocks  int32 [n]  KV blocks of the text
    slot    of its state, where layers keep one: no other text's until its last chunk
    """

    tokens: Int32
    start: int
    blocks: Int32
    slot: int


def chunk_step(
    step_id: int,
    chunks: Sequence[TextChunk],
    block_size: int,
    heads: HeadInput = NO_HEADS,
    log_probs: LogProbInput = NO_LOG_PROBS,
) -> StepInput:
    """A step that computes chunks of different texts, and chooses no token."""
    lengths = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    request_starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    tables = block_tables([chunk.blocks for chunk in chunks])
    owners = np.arange(len(chunks)).repeat(lengths)
    positions = np.arange(len(owners), dtype=np.int32) - (request_starts[:-1] - starts)[owners]
    slots = tables[owners, positions // block_size] * block_size + positions % block_size
    return StepInput(
        step_id=step_id,
        moves=NO_MOVES,
        token_ids=np.concatenate([chunk.tokens for chunk in chunks]),
        positions=positions,
        slots=slots.astype(np.int32),
        request_starts=request_starts,
        context_lens=starts,
        block_tables=tables,
        trees=(None,) * len(chunks),
        logits_rows=NO_ROWS,
        sampling=SamplingRows.greedy(np.empty(0, dtype=np.int64)),
        heads=heads,
        log_probs=log_probs,
        state_slots=np.array([chunk.slot for chunk in chunks], dtype=np.int32),
    )
