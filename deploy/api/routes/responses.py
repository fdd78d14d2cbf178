"""`/v1/responses`, without any memory of what was answered."""

from __future__ import annotations

import time
import uuid
from functools import partial
from http import HTTPStatus

from fastapi import Request, Response

from ....core.errors import RequestError
from ..errors import ApiError, to_api_error
from ..generation.job import Job
from ..output.completions import Heading
from ..output.events import FramedEventStream, until_disconnect
from ..output.json_parts import chat_logprob
from ..output.responses import ResponseRun, ResponseWriter
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
        writer = ResponseRun(self._engine_client, job, parser, ResponseWriter(heading, body, spell))
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
