"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer or a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from fastapi import Request, Response

from ..cluster.loop_calls import off_loop
from ..core.request_options import RequestOptions
from ..core.sampling_params import MAX_SEED, SamplingParams
from .answers import answer_events, whole_answer
from .api.logprob_limits import check_logprobs
from .api.parsing import parse_body
from .callers import caller_of
from .engine_face import EngineFace
from .errors import bad_request
from .event_stream import EventStream, until_disconnect
from .generation import Job
from .metrics import ServerMetrics
from .middleware import read_body
from .model_card import ServedModel
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .responses import ChatFormat, CompletionFormat, Heading
from .settings import ServerConfig

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Prompts = Sequence[Sequence[int]]


class GenerationRoutes:
    """The routes that generate text with one model."""

    def __init__(
        self, face: EngineFace, config: ServerConfig, metrics: ServerMetrics, model: ServedModel
    ) -> None:
        self._face = face
        self._config = config
        self._metrics = metrics
        self._model = model

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        body = await self._read(request, CompletionRequest)
        options = caller_of(request).own(body.request_options())
        codec = self._face.codec
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        encoded = iter(await codec.encode_all(texts))
        prompts = [next(encoded) if isinstance(one, str) else one for one in body.prompt]
        echo = []
        if body.echo:
            pairs = zip(body.prompt, prompts, strict=True)
            echo = [own if isinstance(own, str) else await codec.decode(ids) for own, ids in pairs]
        form = CompletionFormat(self._heading("cmpl"), codec.bytes_of)
        return await self._answer(request, body, prompts, form, options=options, echo=echo)

    async def chat_completions(self, request: Request) -> Response:
        """Answer the last message of a chat."""
        body = await self._read(request, ChatRequest)
        options = caller_of(request).own(body.request_options())
        messages = [message.for_template() for message in body.messages]
        prompt = await self._face.codec.encode_chat(messages)
        form = ChatFormat(self._heading("chatcmpl"), self._face.codec.bytes_of)
        return await self._answer(request, body, [prompt], form, options=options)

    async def _read(self, request: Request, kind: type[RequestT]) -> RequestT:
        data = await read_body(request, self._config.max_body_bytes)
        body = await parse_body(kind, data, self._config.limits)
        self._model.require(body.model)
        return body

    def _heading(self, prefix: str) -> Heading:
        return Heading(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self._model.name)

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Prompts,
        form: CompletionFormat | ChatFormat,
        *,
        options: RequestOptions,
        echo: Sequence[str] = (),
    ) -> Response:
        timeout = self._config.request_timeout_s
        each = body.num_choices
        params = self._params(body, prompts)
        check_logprobs(params, prompts, each, self._face.max_model_len, self._config.limits)
        choices = await off_loop(_choices, params, each) if each > 1 else [params]
        job = Job(
            request_id=form.heading.response_id,
            prompts=[prompt for prompt in prompts for _ in range(each)],
            params=choices * len(prompts),
            num_choices=each,
            echo=[text for text in echo for _ in range(each)],
            options=options,
            report=body.speculative.report,
            deadline=None if timeout is None else asyncio.get_running_loop().time() + timeout,
        )
        if body.stream:
            events = answer_events(
                self._face, job, form, self._metrics, include_usage=body.include_usage
            )
            first = await until_disconnect(request.receive, anext(events))
            return EventStream(first, events)
        answer = whole_answer(self._face, job, form, self._metrics)
        content = await until_disconnect(request.receive, answer)
        return Response(content, media_type="application/json")

    def _params(self, body: GenerationRequest, prompts: Prompts) -> SamplingParams:
        """The sampling; 400 where prompt and answer do not fit the model's context."""
        context = self._face.max_model_len
        longest = max(len(prompt) for prompt in prompts)
        if min(len(prompt) for prompt in prompts) == 0:
            raise bad_request("prompt", "must not be empty")
        room = context - longest
        if room <= 0:
            raise bad_request(
                "prompt",
                f"{longest} tokens leave no room in this model's context of {context} tokens",
            )
        field, limit = body.token_limit
        if field in body.model_fields_set and limit is not None and limit > room:
            raise bad_request(
                field,
                f"{limit} tokens after a prompt of {longest} do not fit this model's context of "
                f"{context} tokens; at most {room} fit",
            )
        return body.sampling_params(None if limit is None else min(limit, room))


def _choices(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Several answers to one prompt: each has a seed of its own, the first the given one."""
    if params.seed is None:
        return [params] * count
    seeds = [(params.seed + index) % (MAX_SEED + 1) for index in range(count)]
    return [replace(params, seed=seed) for seed in seeds]
