"""Sends answers: as one body, or as events of a stream."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....cluster.loop_calls import off_loop
from ....core.request.output import Delta, VerifiedTree
from ....models.text.tokenizer import Detokenizer
from ..engine_client import EngineClient
from ..errors import to_api_error
from ..http.metrics import AnswerRecorder
from .completions import AnswerFormat, Extra, metrics_block
from .job import CompletionOutput, Job, Piece, run_job
from .json_parts import BytesOf

T = TypeVar("T")

DONE = "[DONE]"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    The request's body must have been read. Raises `ClientDisconnect`, and what `work` raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `first` and then each text of `events` as one `data:` line.

    `events` was started by taking `first` from it: an error before the first event has an HTTP
    status of its own. It is closed however the response ends, at once when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        # Proxies must not hold tokens back.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        assert scope["type"] == "http", scope["type"]
        # The client has disconnected.
        with suppress(ClientDisconnect):
            async with aclosing(self._events):
                await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send(self._part(self._first))
        async for event in self._events:
            await send(self._part(event))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _part(self, event: str) -> dict[str, Any]:
        body = self._frame(event).encode()
        return {"type": "http.response.body", "body": body, "more_body": True}

    def _frame(self, event: str) -> str:
        return f"data: {event}\n\n"


class FramedEventStream(EventStream):
    """The same for events that come with the lines around their data."""

    def _frame(self, event: str) -> str:
        return event


logger = logging.getLogger(__name__)

# Parts of a body (`_size`) that take about a millisecond to write.
INLINE_SIZE = 500


async def whole_answer(
    engine_client: EngineClient, job: Job, form: AnswerFormat, metrics: AnswerRecorder
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
    engine_client: EngineClient, job: Job, form: AnswerFormat, answers: Sequence[CompletionOutput]
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
    form: AnswerFormat,
    metrics: AnswerRecorder,
    *,
    include_usage: bool,
) -> AsyncGenerator[str, None]:
    """The texts of a stream's events, `[DONE]` last.

    An error before the first event is raised; a later one is sent as an event.
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
    """Makes the chunks of one stream, and keeps the counts for its end."""

    def __init__(self, engine_client: EngineClient, job: Job, form: AnswerFormat) -> None:
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
        """The chunk of a delta; empty if there is nothing to send."""
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
    token_ids: Sequence[int], sources: Sequence[str], stream: Detokenizer
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
