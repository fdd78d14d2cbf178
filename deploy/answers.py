"""Turns the deltas of a job into an answer: one body, or the events of a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ..core.output import Delta
from ..models.tokenizer import TextStream
from .engine_face import EngineFace
from .errors import to_api_error
from .event_stream import DONE
from .generation import Job, run_job
from .metrics import ServerMetrics
from .responses import Extra, ResponseFormat, metrics_block

logger = logging.getLogger(__name__)


async def whole_answer(
    face: EngineFace, job: Job, form: ResponseFormat, metrics: ServerMetrics
) -> str:
    """The JSON body of the finished answer. Raises what `run_job` raises."""
    answers = job.answers()
    async with aclosing(run_job(face, job, metrics)) as deltas:
        async for index, delta in deltas:
            answers[index].add(delta)
    extra = metrics_block(answers)
    if job.report:
        extra["draftline"] = [
            source_report(answer.token_ids, answer.sources, TextStream(face.codec.tokenizer))
            for answer in answers
        ]
    return form.body(answers, job.num_choices, extra)


async def answer_events(
    face: EngineFace,
    job: Job,
    form: ResponseFormat,
    metrics: ServerMetrics,
    *,
    include_usage: bool,
) -> AsyncGenerator[str, None]:
    """The texts of a stream's events, `[DONE]` last.

    What goes wrong before the first event is raised; later it is sent as an event of its own.
    """
    writer = _ChunkWriter(face, job, form)
    try:
        async with aclosing(run_job(face, job, metrics)) as deltas:
            async for index, delta in deltas:
                for chunk in writer.chunks(index, delta):
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

    def __init__(self, face: EngineFace, job: Job, form: ResponseFormat) -> None:
        self.answers = job.answers()
        self.has_begun = False
        self._form = form
        self._report = job.report
        self._texts = [TextStream(face.codec.tokenizer) for _ in job.prompts if job.report]

    def chunks(self, index: int, delta: Delta) -> list[str]:
        """The chunk of a delta, or nothing where it has nothing to say."""
        piece = self.answers[index].add(delta)
        says = piece.text or piece.finish_reason or piece.log_probs or piece.token_ids
        if not (piece.is_first or says or self._report):
            return []
        extra: Extra = {}
        if self._report:
            stream = self._texts[index]
            extra["draftline"] = source_report(delta.token_ids, delta.sources, stream)
        chunk = self._form.chunk(index, piece, extra)
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
