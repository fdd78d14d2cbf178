"""Runs a job into an answer and sends it: as one body, or as events of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....cluster.loop_calls import off_loop
from ....core.request.output import (
    Delta,
    VerifiedTree,
)
from ....models.text.tokenizer import Detokenizer
from ..engine_client import EngineClient, TextCodec
from ..errors import ApiError, to_api_error
from ..http.metrics import AnswerRecorder
from ..tools.events import Parser
from .completions import BytesOf, ChatFormat, CompletionFormat, Fields, metrics_block, write_json
from .job import CompletionOutput, Job, Piece, run_job
from .messages import MessageWriter
from .responses import ResponseWriter

T = TypeVar("T")

DONE = "data: [DONE]\n\n"


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
    """Sends `first` and then `events`, each with the lines around its data.

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
        await send(_part(self._first))
        async for event in self._events:
            await send(_part(event))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(event: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event.encode(), "more_body": True}


# Parts of a body (`_size`) that take about a millisecond to write.
INLINE_SIZE = 500


class ChoicesAnswer:
    """The choices of a completion or a chat.

    include_usage  whether a stream ends with a chunk of usage
    """

    def __init__(
        self,
        codec: TextCodec,
        job: Job,
        form: CompletionFormat | ChatFormat,
        *,
        include_usage: bool,
    ) -> None:
        self._answers = job.answers()
        self._form = form
        self._job = job
        self._include_usage = include_usage
        self._bytes_of = codec.bytes_of
        # Of answers that name the source of every token.
        self._texts = [
            codec.text_stream(answer.prompt_ids, answer.params)
            for answer in self._answers
            if job.report
        ]

    def take(self, index: int, delta: Delta) -> None:
        """Add a delta."""
        self._answers[index].add(delta)

    async def body(self) -> bytes:
        """The whole answer."""
        if sum(self._size(answer.whole()) for answer in self._answers) <= INLINE_SIZE:
            return self._body()
        return await off_loop(self._body)

    def _body(self) -> bytes:
        extra = metrics_block(self._answers)
        if self._job.report:
            extra["draftline"] = [
                source_report(answer.token_ids, answer.sources, text)
                for answer, text in zip(self._answers, self._texts, strict=True)
            ]
        return self._form.body(self._answers, self._job.num_choices, extra).encode()

    async def events(self, index: int, delta: Delta) -> Sequence[str]:
        """The chunk of a delta; none if there is nothing to send."""
        piece = self._answers[index].add(delta)
        says = piece.text or piece.finish_reason or piece.log_probs or piece.token_ids
        if not (piece.is_first or says or self._job.report):
            return ()
        extra: Fields = {}
        if self._job.report:
            extra["draftline"] = source_report(delta.token_ids, delta.sources, self._texts[index])
            if delta.trees and self._job.shows_trees:
                spell = self._bytes_of
                extra["draftline"]["trees"] = [tree_report(tree, spell) for tree in delta.trees]
        if self._size(piece) <= INLINE_SIZE:
            chunk = self._form.chunk(index, piece, extra)
        else:
            chunk = await off_loop(self._form.chunk, index, piece, extra)
        return (f"data: {chunk}\n\n",) if chunk else ()

    def fail(self, error: ApiError) -> Sequence[str]:
        """The error as an event, and `[DONE]`."""
        return f"data: {write_json(error.body)}\n\n", DONE

    def end(self) -> Sequence[str]:
        """The usage, where it is wanted, and `[DONE]`."""
        if not self._include_usage:
            return (DONE,)
        extra = metrics_block(self._answers)
        chunk = self._form.last_chunk(self._answers, self._job.num_choices, extra)
        return f"data: {chunk}\n\n", DONE

    def _size(self, piece: Piece) -> int:
        """About how many parts of a body stand for a piece: characters in tens, numbers, texts."""
        params = self._job.params[0]
        num_top = params.logprobs or params.prompt_logprobs or 0
        num_probs = len(piece.log_probs or ()) * (1 + num_top)
        num_prompt_probs = len(piece.prompt_log_probs or ()) * (1 + (params.prompt_logprobs or 0))
        num_texts = len(piece.text) // 10 * (2 if self._job.report else 1)
        return 20 + num_texts + num_probs + num_prompt_probs


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


class ItemsAnswer:
    """A response or a message. `parser` finds the items in its text."""

    def __init__(self, job: Job, parser: Parser, writer: MessageWriter | ResponseWriter) -> None:
        self._parser = parser
        self._writer = writer
        self._answer: CompletionOutput = job.answers()[0]
        self._has_begun = False

    def take(self, _index: int, delta: Delta) -> None:
        """Add a delta."""
        self._answer.add(delta)

    async def body(self) -> bytes:
        """The whole answer."""
        return await off_loop(self._body)

    def _body(self) -> bytes:
        self._write(self._answer.whole())
        return write_json(self._writer.body(metrics_block([self._answer]))).encode()

    async def events(self, _index: int, delta: Delta) -> Sequence[str]:
        """The events of a delta."""
        events = [] if self._has_begun else self._writer.begin()
        self._has_begun = True
        return [framed(event) for event in (*events, *self._write(self._answer.add(delta)))]

    def fail(self, error: ApiError) -> Sequence[str]:
        """The error as an event."""
        return (framed(self._writer.fail(error)),)

    def end(self) -> Sequence[str]:
        """The last event, with the whole answer."""
        return (framed(self._writer.last_event(metrics_block([self._answer]))),)

    def _write(self, piece: Piece) -> list[Fields]:
        """The events of a piece."""
        tokens = [token for token in piece.log_probs or () if token is not None]
        events = self._parser.push(piece.text)
        reason = piece.finish_reason
        if reason is None:
            return self._writer.add(events, tokens)
        parts = self._writer.add([*events, *self._parser.finish()], tokens)
        return parts + self._writer.finish(reason, piece.stop_reason, self._answer.metrics)


def framed(event: Fields) -> str:
    """An event as server-sent events spell it, with its name."""
    return f"event: {event['type']}\ndata: {write_json(event)}\n\n"


# An answer in an API's shape while it is generated.
Answer = ChoicesAnswer | ItemsAnswer


async def whole_answer(
    engine_client: EngineClient, job: Job, answer: Answer, metrics: AnswerRecorder
) -> bytes:
    """The body of the finished answer. Raises what `run_job` raises."""
    async with aclosing(run_job(engine_client, job, metrics)) as deltas:
        async for index, delta in deltas:
            answer.take(index, delta)
    return await answer.body()


async def answer_events(
    engine_client: EngineClient, job: Job, answer: Answer, metrics: AnswerRecorder
) -> AsyncGenerator[str, None]:
    """The events of a stream.

    An error before the first event is raised; a later one is sent as an event.
    """
    has_begun = False
    try:
        async with aclosing(run_job(engine_client, job, metrics)) as deltas:
            async for index, delta in deltas:
                for event in await answer.events(index, delta):
                    has_begun = True
                    yield event
    except Exception as error:  # the status is sent: only an event can tell the client
        if not has_begun:
            raise
        for event in answer.fail(to_api_error(error)):
            yield event
    else:
        for event in answer.end():
            yield event
