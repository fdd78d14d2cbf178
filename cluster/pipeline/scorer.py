"""Scores texts with the target, over any pipeline (for `retrieval_store/corpus/refine.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ...core.arrays import Float32, Int32
from ...core.steps import LogProbInput, StepInput
from ..transport.stage_spec import Pipeline
from .chunk_step import TextChunk, chunk_step


class PipelineScorer:
    """Log-probabilities of documents' tokens; each is one causal chunk of one step.

    The pipeline must be open and have no other user: documents take its KV slots from 0 on.
    At most `max_rows` tokens, and `max_documents`, which are whole, go in a step.
    """

    def __init__(
        self, pipeline: Pipeline, num_blocks: int, block_size: int, max_rows: int,
        max_documents: int,
    ) -> None:  # fmt: skip
        self._pipeline = pipeline
        self._block_size, self._max_documents = block_size, max_documents
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
            if rows > left or len(batches[-1]) == self._max_documents:
                batches.append([])
                left = self._max_rows
            batches[-1].append(document)
            left -= rows
        return batches


def build_scoring_step(step_id: int, documents: Sequence[Int32], block_size: int) -> StepInput:
    """One step that asks for the log-probability of every token but each document's first."""
    chunks: list[TextChunk] = []
    first_block = 0
    for slot, document in enumerate(documents):
        end_block = first_block + -(-len(document) // block_size)
        blocks = np.arange(first_block, end_block, dtype=np.int32)
        chunks.append(TextChunk(document.astype(np.int32), 0, blocks, slot))
        first_block = end_block
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    is_last = np.zeros(len(tokens), dtype=np.bool_)
    is_last[np.cumsum([len(document) for document in documents]) - 1] = True
    rows = np.flatnonzero(~is_last).astype(np.int32)
    log_probs = LogProbInput(scored_rows=rows, scored_tokens=tokens[rows + 1])
    return chunk_step(step_id, chunks, block_size, log_probs=log_probs)
