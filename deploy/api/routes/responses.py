"""`/v1/responses`, without any memory of what was answered."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from http import HTTPStatus

from fastapi import Request, Response

from ....cluster.loop_calls import off_loop
from ....core.errors import RequestError
from ..engine_client import EngineClient
from ..errors import ApiError, to_api_error
from ..generation.job import CompletionOutput, Job, Piece, run_job
from ..http.metrics import AnswerRecorder
from ..output.completions import Heading, metrics_block
from ..output.event_stream import FramedEventStream, until_disconnect, write_json
from ..output.json_parts import chat_logprob
from ..output.responses import ResponseWriter, framed
from ..schema.responses import ResponsesRequest, named_here
from ..tools.events import Parser
from ..tools.reasoning import PlainParser
from .generation import GenerationRoutes
from .models import ServedModel


class ResponsesRoutes:
    """Responses of one model."""

    def __init__(self, model: ServedModel, generation: GenerationRoutes) -> None:
        self._engine_client = model.source.engine_client
        self._metrics = model.source.metrics
        self._name = model.name
        self._generation = generation

    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a text or the items of a conversation."""
        heading = Heading(f"resp_{uuid.uuid4().hex}", int(time.time()), self._name)
        try:
            job, parser = await self._job(request, body, heading.response_id)
        except (ApiError, RequestError) as error:
            raise named_here(to_api_error(error)) from error
        spell = partial(chat_logprob, self._engine_client.codec.bytes_of)
        writer = _AnswerWriter(
            self._engine_client, job, parser, ResponseWriter(heading, body, spell)
        )
        if body.stream:
            events = writer.events(self._metrics)
            first = await until_disconnect(request.receive, anext(events))
            return FramedEventStream(first, events)
        content = await until_disconnect(request.receive, writer.whole(self._metrics))
        return Response(content, media_type="application/json")

    async def _job(
        self, request: Request, body: ResponsesRequest, response_id: str
    ) -> tuple[Job, Parser]:
        """The work for the engine, and the writer of its answer."""
        chat = body.chat()
        plan = await self._generation.plan(chat)
        prompt = chat.cut_prompt(plan.prompt, self._generation.context(request))
        job = await self._generation.job(request, chat, [prompt], response_id, plan=plan)
        return job, PlainParser() if plan.new_parser is None else plan.new_parser()


async def find(response_id: str) -> Response:
    """404: responses are not stored."""
    raise ApiError(
        HTTPStatus.NOT_FOUND,
        f"{response_id!r} is not here: this server keeps no responses; send the whole "
        "conversation as input of the next one",
        param="response_id",
    )


class _AnswerWriter:
    """Runs one job into one response."""

    def __init__(
        self, engine_client: EngineClient, job: Job, parser: Parser, response: ResponseWriter
    ) -> None:
        self._engine_client = engine_client
        self._job = job
        self._parser = parser
        self._response = response
        self._answer: CompletionOutput = job.answers()[0]

    async def whole(self, metrics: AnswerRecorder) -> bytes:
        """The body as JSON. Raises what `run_job` raises."""
        async with aclosing(run_job(self._engine_client, self._job, metrics)) as deltas:
            async for _, delta in deltas:
                self._answer.add(delta)
        return await off_loop(self._body)

    def _body(self) -> bytes:
        self._write(self._answer.whole())
        return write_json(self._response.body(metrics_block([self._answer]))).encode()

    async def events(self, metrics: AnswerRecorder) -> AsyncGenerator[str, None]:
        """The events of a stream, with their names.

        What goes wrong before the first event is raised; later it is an event of its own.
        """
        has_begun = False
        try:
            async with aclosing(run_job(self._engine_client, self._job, metrics)) as deltas:
                async for _, delta in deltas:
                    parts = [] if has_begun else self._response.begin()
                    parts += self._write(self._answer.add(delta))
                    for event in parts:
                        has_begun = True
                        yield framed(event)
        except Exception as error:  # the status is sent: only an event can tell the client
            if not has_begun:
                raise
            yield framed(self._response.fail(to_api_error(error)))
        else:
            yield framed(self._response.last_event(metrics_block([self._answer])))

    def _write(self, piece: Piece) -> list[dict[str, object]]:
        """The events of a piece."""
        tokens = [token for token in piece.log_probs or () if token is not None]
        events = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.finish()
        parts = self._response.add(events, tokens)
        if piece.finish_reason is not None:
            metrics = [] if self._answer.metrics is None else [self._answer.metrics]
            parts += self._response.finish(piece.finish_reason, metrics)
        return parts
