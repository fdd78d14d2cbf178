"""Turns the deltas of a job into an answer: one body, or the events of a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ....cluster.loop_calls import off_loop
from ....core.request.output import Delta, VerifiedTree
from ....models.text.tokenizer import TextStream
from ..engine_client import EngineClient
from ..errors import to_api_error
from ..generation.job import CompletionOutput, Job, Piece, run_job
from ..http.metrics import AnswerRecorder
from .completions import Extra, ResponseFormat, metrics_block
from .event_stream import DONE
from .json_parts import BytesOf

logger = logging.getLogger(__name__)

# Parts of a body (`_size`) that take about a millisecond to write.
INLINE_SIZE = 500


async def whole_answer(
    engine_client: EngineClient, job: Job, form: ResponseFormat, metrics: AnswerRecorder
) -> bytes:
    """The JSON body of the finished answer. Raises what `run_job` raises."""
    answers = job.answers()
    async with aclosing(run_job(engine_client, job, metrics)) as deltas:
        async for index, delta in deltas:
            answers[index].add(delta)
    if sum(_size(answer.whole(), job) for answer in answers) <= INLINE_SIZE:
        return _body(engine_client, job, form, answers)
    return await off_loop(_body, engine_client, job, form, answers)


def _body(
    engine_client: EngineClient, job: Job, form: ResponseFormat, answers: Sequence[CompletionOutput]
) -> bytes:
    extra = metrics_block(answers)
    if job.report:
        new_text = engine_client.codec.text_stream
        extra["draftline"] = [
            source_report(
                answer.token_ids, answer.sources, new_text(answer.prompt_ids, answer.params)
            )
            for answer in answers
        ]
    return form.body(answers, job.num_choices, extra).encode()


def _size(piece: Piece, job: Job) -> int:
    """About how many parts of a body stand for a piece: characters in tens, numbers and texts."""
    params = job.params[0]
    num_probs = len(piece.log_probs or ()) * (1 + (params.logprobs or params.prompt_logprobs or 0))
    num_prompt_probs = len(piece.prompt_log_probs or ()) * (1 + (params.prompt_logprobs or 0))
    return 20 + len(piece.text) // 10 * (2 if job.report else 1) + num_probs + num_prompt_probs


async def answer_events(
    engine_client: EngineClient,
    job: Job,
    form: ResponseFormat,
    metrics: AnswerRecorder,
    *,
    include_usage: bool,
) -> AsyncGenerator[str, None]:
    """The texts of a stream's events, `[DONE]` last.

    What goes wrong before the first event is raised; later it is sent as an event of its own.
    """
    writer = _ChunkWriter(engine_client, job, form)
    try:
        async with aclosing(run_job(engine_client, job, metrics)) as deltas:
            async for index, delta in deltas:
                for chunk in await writer.chunks(index, delta):
                    yield chunk
    except Exception as error:  # the status is sent: only an event can tell the client
        if not writer.has_begun:
            raise
        yield json.dumps(to_api_error(error).body, separators=(",", ":"))
    else:
        if include_usage:
            yield form.last_chunk(writer.answers, job.num_choices, metrics_block(writer.answers))
    yield DONE


class _ChunkWriter:
    """Makes the chunks of one stream and keeps what its end needs to know."""

    def __init__(self, engine_client: EngineClient, job: Job, form: ResponseFormat) -> None:
        self.answers = job.answers()
        self.has_begun = False
        self._form = form
        self._job = job
        self._report = job.report
        self._bytes_of = engine_client.codec.bytes_of
        self._texts = [
            engine_client.codec.text_stream(answer.prompt_ids, answer.params)
            for answer in self.answers
            if job.report
        ]

    async def chunks(self, index: int, delta: Delta) -> list[str]:
        """The chunk of a delta, or nothing where it has nothing to say."""
        piece = self.answers[index].add(delta)
        says = piece.text or piece.finish_reason or piece.log_probs or piece.token_ids
        if not (piece.is_first or says or self._report):
            return []
        extra: Extra = {}
        if self._report:
            stream = self._texts[index]
            extra["draftline"] = source_report(delta.token_ids, delta.sources, stream)
            if delta.trees and self._job.shows_trees:
                spell = self._bytes_of
                extra["draftline"]["trees"] = [tree_report(tree, spell) for tree in delta.trees]
        if _size(piece, self._job) <= INLINE_SIZE:
            chunk = self._form.chunk(index, piece, extra)
        else:
            chunk = await off_loop(self._form.chunk, index, piece, extra)
        if not chunk:
            return []
        self.has_begun = True
        return [chunk]


def source_report(
    token_ids: Sequence[int], sources: Sequence[str], stream: TextStream
) -> dict[str, Any]:
    """Each token with its source and the text that it made final; parallel lists."""
    return {
        "token_ids": list(token_ids),
        "sources": list(sources),
        "texts": [stream.push(token_id) for token_id in token_ids],
    }


def tree_report(tree: VerifiedTree, bytes_of: BytesOf) -> dict[str, Any]:
    """A step's tree: of its nodes parallel lists; a token that is no whole text shows as U+FFFD."""
    return {
        "root": bytes_of(tree.root_id).decode(errors="replace"),
        "token_ids": list(tree.token_ids),
        "texts": [bytes_of(token_id).decode(errors="replace") for token_id in tree.token_ids],
        "parents": list(tree.parents),
        "sources": list(tree.sources),
        "values": [round(value, 4) for value in tree.values],
        "path": list(tree.path),
        "num_left_out": tree.num_left_out,
        "asked": list(tree.timing.asked),
        "draft_s": round(tree.timing.draft_s, 6),
        "verify_s": round(tree.timing.verify_s, 6),
    }
