"""Scores texts with the target, over any pipeline (for `retrieval_store/corpus/refine.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ...core.arrays import Float32, Int32
from ...core.steps import LogProbInput, SamplingRows, StepInput
from ..transport.stage_spec import Pipeline

NO_ROWS = np.empty(0, dtype=np.int32)


class PipelineScorer:
    """Log-probabilities of documents' tokens; each is one causal chunk of one step.

    The pipeline must be open and have no other user: documents take its KV slots from 0 on.
    `max_rows` tokens, in whole documents, go in a step.
    """

    def __init__(self, pipeline: Pipeline, num_blocks: int, block_size: int, max_rows: int) -> None:
        self._pipeline = pipeline
        self._block_size = block_size
        self._max_rows = min(max_rows, num_blocks * block_size)
        self._next_step_id = 0

    def log_probs(self, documents: Sequence[Int32]) -> list[Float32]:
        """Log-probability, nats, of every token but the first of each document, in order.

        Each is given all tokens before it. A document must fit the model's context and the KV
        cache.
        """
        return asyncio.run(self._log_probs(documents))

    async def _log_probs(self, documents: Sequence[Int32]) -> list[Float32]:
        results: list[Float32] = []
        for batch in self._batches(documents):
            step = build_scoring_step(self._next_step_id, batch, self._block_size)
            self._next_step_id += 1
            scores = (await self._pipeline.submit(step)).log_probs.scores
            assert scores is not None, "the stage did not do what it was asked"
            ends = np.cumsum([len(document) - 1 for document in batch])
            results += np.split(scores, ends[:-1])
        return results

    def _batches(self, documents: Sequence[Int32]) -> list[list[Int32]]:
        """Consecutive documents that fit one step, each in blocks of its own."""
        batches: list[list[Int32]] = []
        left = 0
        for document in documents:
            rows = -(-len(document) // self._block_size) * self._block_size
            assert rows <= self._max_rows, f"a document of {len(document)} tokens does not fit"
            if rows > left:
                batches.append([])
                left = self._max_rows
            batches[-1].append(document)
            left -= rows
        return batches


def build_scoring_step(step_id: int, documents: Sequence[Int32], block_size: int) -> StepInput:
    """One step that asks for the log-probability of every token but each document's first."""
    lengths = [len(document) for document in documents]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_blocks = [-(-length // block_size) for length in lengths]
    first_blocks = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int32)
    tables = first_blocks[:-1, None] + np.arange(max(num_blocks), dtype=np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    tokens = np.concatenate(documents).astype(np.int32)
    is_last = np.zeros(len(tokens), dtype=np.bool_)
    is_last[starts[1:] - 1] = True
    scored_rows = np.flatnonzero(~is_last).astype(np.int32)
    return StepInput(
        step_id=step_id,
        moves=np.empty((0, 2), dtype=np.int32),
        token_ids=tokens,
        positions=positions,
        slots=np.repeat(first_blocks[:-1] * block_size, lengths).astype(np.int32) + positions,
        request_starts=starts,
        context_lens=np.zeros(len(documents), dtype=np.int32),
        block_tables=tables.astype(np.int32),
        trees=(None,) * len(documents),
        logits_rows=NO_ROWS,
        sampling=SamplingRows.greedy(np.empty(0, dtype=np.int64)),
        log_probs=LogProbInput(scored_rows=scored_rows, scored_tokens=tokens[scored_rows + 1]),
    )
