"""Reads the hidden states of texts from the stages of a pipeline, for the training of heads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.errors import ConfigError, StageLost
from ...core.steps import HeadInput, StepInput
from ..loop_calls import end_tasks
from ..transport.stage_spec import Pipeline
from .chunk_step import TextChunk, chunk_step

T = TypeVar("T")


class TextPiece(NamedTuple):
    """Tokens `start` to `end` of text number `text` in one step; `blocks` has KV for all of it."""

    text: int
    start: int
    end: int
    blocks: tuple[int, ...]


class HiddenStateReader:
    """A context manager: entered, it starts a pipeline, which has no other user until the end.

    A thread of its own drives the pipeline, so that stages compute while the caller does.
    """

    def __init__(
        self,
        make_pipeline: Callable[[], Pipeline],
        layers: Sequence[int],
        hidden_size: int,
        *,
        block_size: int,
        max_rows: int,
        max_texts: int,
        step_timeout_s: float,
    ) -> None:
        """`make_pipeline` is called when the context is entered.

        layers          whose outputs the pipeline's stages return, ascending (`StageOptions`)
        block_size      tokens in a KV block of the stages
        max_rows        most tokens of a step; longer texts are computed in several
        max_texts       most texts of a step
        step_timeout_s  a step without an answer for this long counts as a lost stage
        """
        self._make_pipeline = make_pipeline
        self._layers = tuple(layers)
        self._width = len(layers) * hidden_size
        self._block_size, self._max_rows, self._max_texts = block_size, max_rows, max_texts
        self._step_timeout_s = step_timeout_s
        self._next_step_id = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="draftline-reader", daemon=True)

    def __enter__(self) -> Self:
        """Start the pipeline. Raises what its start raises, such as `StageLost`."""
        self._thread.start()
        try:
            self._call(self._start()).result()
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pipeline. Texts that are still being read raise `StageLost`."""
        try:
            self._call(self._pipeline.close()).result()
        finally:
            self._end_thread()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose outputs are read, ascending; -1: the embeddings."""
        return self._layers

    def launch(self, tokens: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to read texts int64 [texts, length], of each its first `lengths` tokens.

        The returned function waits for float32 [texts, length, len(layers) * hidden_size], on the
        CPU; zeros behind a text's end. It raises `StageLost` or `StageError`.

        Raises `ConfigError` for a text that the stages' KV caches have no room for.
        """
        rows = tokens.numpy(force=True).astype(np.int32)
        num_slots = self._pipeline.num_blocks * self._block_size
        if max(lengths) > num_slots:
            raise ConfigError(
                "kv_cache_tokens", f"is {num_slots}, less than a text of {max(lengths)} tokens"
            )
        states = torch.zeros(*tokens.shape, self._width)
        cut = cut_texts(
            lengths, self._max_rows, self._max_texts, self._pipeline.num_blocks, self._block_size
        )
        steps = [(self._step(rows, pieces), pieces) for pieces in cut]
        return self._call(self._read(steps, states)).result

    def _step(self, tokens: Int32, pieces: Sequence[TextPiece]) -> StepInput:
        self._next_step_id += 1
        chunks = [
            TextChunk(
                tokens[text, start:end],
                start,
                np.array(blocks, dtype=np.int32),
                # Those of a step follow each other.
                slot=text % self._max_texts,
            )
            for text, start, end, blocks in pieces
        ]
        heads = HeadInput(feature_requests=tuple(range(len(chunks))))
        return chunk_step(self._next_step_id, chunks, self._block_size, heads)

    async def _start(self) -> None:
        self._pipeline = self._make_pipeline()
        await self._pipeline.start()
        self._in_flight = asyncio.Semaphore(self._pipeline.max_in_flight)

    async def _read(
        self, steps: Sequence[tuple[StepInput, Sequence[TextPiece]]], states: Tensor
    ) -> Tensor:
        # They are submitted in this order, as each text's KV needs it.
        await asyncio.gather(*(self._answer(step, pieces, states) for step, pieces in steps))
        return states

    async def _answer(self, step: StepInput, pieces: Sequence[TextPiece], states: Tensor) -> None:
        async with self._in_flight:
            try:
                async with asyncio.timeout(self._step_timeout_s):
                    features = (await self._pipeline.submit(step)).features
            except TimeoutError:
                seconds = f"{self._step_timeout_s:g} s (step_timeout_s)"
                raise StageLost(f"a step has no answer after {seconds}: a stage hangs") from None
        assert features is not None, "the stage did not do what it was asked"
        assert features.shape == (len(step.token_ids), self._width)
        first = 0
        for text, start, end, _ in pieces:
            own = features[first : first + end - start]
            states[text, start:end] = torch.from_numpy(own)
            first += len(own)

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(end_tasks())
        self._loop.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def cut_texts(
    lengths: Sequence[int], max_rows: int, max_texts: int, num_blocks: int, block_size: int
) -> Iterator[list[TextPiece]]:
    """The pieces of each step: texts one after the other, cut where a step is full.

    A text's KV blocks go to other texts as soon as its last piece is in an earlier step, as stages
    run steps in order. `num_blocks` must be enough for the longest text.
    """
    free, ended = list(range(num_blocks)), list[int]()
    pieces, room = list[TextPiece](), max_rows
    for text, length in enumerate(lengths):
        count, blocks, start = -(-length // block_size), tuple[int, ...](), 0
        while start < length:
            is_full = len(pieces) == max_texts or count > len(free)
            if not room or (not start and is_full):
                yield pieces
                pieces, room = [], max_rows
                free, ended = [*free, *ended], []
            if not start:
                blocks, free = tuple(free[:count]), free[count:]
            end = min(length, start + room)
            pieces.append(TextPiece(text, start, end, blocks))
            room -= end - start
            start = end
        ended += blocks
    if pieces:
        yield pieces
