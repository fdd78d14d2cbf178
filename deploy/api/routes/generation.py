"""Completions, chats, responses, messages and tokens: from a body to an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ....cluster.loop_calls import off_loop
from ....core.errors import RequestError
from ....core.request.sampling_params import MAX_SEED, SamplingParams, answer_room
from ..errors import ApiError, to_api_error
from ..http.callers import admission_of, caller_of, require_operator
from ..output.completions import ChatFormat, CompletionFormat, Heading, chat_logprob, json_response
from ..output.events import (
    Answer,
    ChoicesAnswer,
    EventStream,
    ItemsAnswer,
    answer_events,
    until_disconnect,
    whole_answer,
)
from ..output.job import Job, check_logprobs
from ..output.messages import MessageWriter
from ..output.responses import ResponseWriter
from ..output.stream_pace import Pace
from ..schema.messages import CountTokensRequest, MessagesRequest
from ..schema.protocol import (
    ChatForm,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from ..schema.request_models import RequestModel
from ..schema.responses import ResponsesRequest
from ..tools.chat_plan import ChatPlan, ChatPlanner, PlainParser
from .models import Bodies, ServedModel, name_ignored

if TYPE_CHECKING:
    from ...observe.spans import RequestSpans, RequestTracer

Prompts = Sequence[Sequence[int]]
# As Ray Serve names it, by default.
SESSION_HEADER = "x-session-id"


class ModelRoutes:
    """What is posted to one model. `tracer` makes spans of requests."""

    def __init__(self, model: ServedModel, tracer: RequestTracer | None = None) -> None:
        self._tracer = tracer
        self._engine_client = model.engine_client
        self._config = model.config
        self._pace = Pace.of(model.config)
        self._metrics = model.metrics
        self._model = model

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue one or several prompts."""
        codec = self._engine_client.codec
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        encoded = iter(await codec.encode_all(texts, special=body.add_special_tokens))
        whole = [next(encoded) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        context = self._context(request)
        prompts = [body.cut_prompt(prompt, context) for prompt in whole]
        echo = []
        if body.echo:
            pairs = zip(body.prompt, whole, prompts, strict=True)
            echo = [
                text if isinstance(text, str) and ids is cut else await codec.decode(cut, "prompt")
                for text, ids, cut in pairs
            ]
        form = CompletionFormat(
            self._heading("cmpl-"),
            codec.bytes_of,
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        return await self._answer(request, body, prompts, form, echo)

    async def chat_completions(self, request: Request, body: ChatRequest) -> Response:
        """Answer the last message of a chat."""
        codec = self._engine_client.codec
        plan = await self._plan(body)
        form = ChatFormat(
            self._heading("chatcmpl-"),
            codec.bytes_of,
            plan.new_parser,
            include_reasoning=body.include_reasoning,
        )
        prompt = body.cut_prompt(plan.prompt, self._context(request))
        return await self._answer(request, body, [prompt], form, plan=plan)

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a text or the items of a conversation."""
        heading = self._heading("resp_")
        plan, job = await self._chat_job(request, body, heading)
        spell = partial(chat_logprob, self._engine_client.codec.bytes_of)
        return await self._items(request, body, plan, job, ResponseWriter(heading, body, spell))

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        """The next message of a chat, as Anthropic's API has it."""
        heading = self._heading("msg_")
        plan, job = await self._chat_job(request, body, heading)
        writer = MessageWriter(heading, len(job.prompts[0]))
        return await self._items(request, body, plan, job, writer)

    async def count_tokens(self, _request: Request, body: CountTokensRequest) -> Response:
        """Tokens of the prompt of a message."""
        try:
            plan = await self._plan(body.chat())
        except (ApiError, RequestError) as error:
            raise body.named_here(to_api_error(error)) from error
        return JSONResponse({"input_tokens": len(plan.prompt)})

    async def tokenize(self, _request: Request, body: TokenizeRequest) -> Response:
        """Token ids of a text or of a chat."""
        codec = self._engine_client.codec
        if body.messages is not None:
            tokens = await ChatPlanner(codec, self._config).encode(body, body.messages)
        else:
            tokens = await codec.encode(body.prompt or "", special=body.add_special_tokens)
        answer = {
            "count": len(tokens),
            "max_model_len": self._engine_client.max_model_len,
            "tokens": tokens,
            "token_strs": await codec.token_strs(tokens) if body.return_token_strs else None,
        }
        return await json_response(answer, len(tokens))

    async def detokenize(self, _request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        answer = {"prompt": await self._engine_client.codec.decode(body.tokens)}
        return await json_response(answer, len(body.tokens))

    async def _chat_job(
        self, request: Request, body: ChatForm, heading: Heading
    ) -> tuple[ChatPlan, Job]:
        """How the chat that a body stands for is answered, and what is generated."""
        try:
            chat = body.chat()
            plan = await self._plan(chat)
            prompt = chat.cut_prompt(plan.prompt, self._context(request))
            return plan, await self._job(request, chat, [prompt], heading.response_id, plan=plan)
        except (ApiError, RequestError) as error:
            raise body.named_here(to_api_error(error)) from error

    async def _items(
        self,
        request: Request,
        body: ChatForm,
        plan: ChatPlan,
        job: Job,
        writer: MessageWriter | ResponseWriter,
    ) -> Response:
        """An answer of several items, whole or as a stream."""
        parser = PlainParser() if plan.new_parser is None else plan.new_parser()
        return await self._sent(request, job, ItemsAnswer(job, parser, writer), stream=body.stream)

    async def _sent(
        self, request: Request, job: Job, answer: Answer, *, stream: bool | None
    ) -> Response:
        """The job's answer, whole or as a stream."""
        if stream:
            events = answer_events(self._engine_client, job, answer, self._metrics)
            first = await until_disconnect(request.receive, anext(events))
            return EventStream(first, events)
        work = whole_answer(self._engine_client, job, answer, self._metrics)
        content = await until_disconnect(request.receive, work)
        return Response(content, media_type="application/json")

    def _context(self, request: Request) -> int:
        """Most tokens of a request of this caller, prompt and answer."""
        return caller_of(request).context(self._engine_client.max_model_len)

    async def _plan(self, body: ChatRequest) -> ChatPlan:
        """How a chat is answered. Raises `ApiError` 400 and `RequestError`."""
        output = body.structured_output_form()
        planner = ChatPlanner(self._engine_client.codec, self._config)
        return await planner.plan(body, body.messages, output)

    def _heading(self, prefix: str) -> Heading:
        return Heading(f"{prefix}{uuid.uuid4().hex}", int(time.time()), self._model.name)

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Prompts,
        form: CompletionFormat | ChatFormat,
        echo: Sequence[str] = (),
        *,
        plan: ChatPlan | None = None,
    ) -> Response:
        response_id = form.heading.response_id
        job = await self._job(request, body, prompts, response_id, echo=echo, plan=plan)
        answer = ChoicesAnswer(
            self._engine_client.codec, job, form, include_usage=body.include_usage
        )
        return await self._sent(request, job, answer, stream=body.stream)

    async def _job(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Prompts,
        response_id: str,
        *,
        echo: Sequence[str] = (),
        plan: ChatPlan | None = None,
    ) -> Job:
        """What a body asks of the engine; a chat's as its plan says.

        Raises `ApiError` 400, 403 or 429, or `RequestError`; 403 for a tenant that asks for trees,
        which hold what drafters know of others.
        """
        if body.speculative.explain:
            require_operator(request)
        timeout = self._config.request_timeout_s
        each, context = body.num_choices, self._context(request)
        params = self._params(body, prompts, context)
        options = caller_of(request).with_tenant(body.request_options())
        if (session := request.headers.get(SESSION_HEADER)) is not None:
            options = replace(options, session=session)
        if plan is not None:
            params = plan.shape(params)
        check_logprobs(params, prompts, each, context, self._config.limits)
        admission = admission_of(request)
        if admission is not None:
            await admission.take_tokens(sum(map(len, prompts)))
        # Each of them is checked, with all lists of tokens in it.
        choices = [params] if each == 1 else await off_loop(_choices, params, each)
        spans = self._spans(request, body, response_id)
        if spans is not None:
            options = replace(options, explain=True)
        return Job(
            request_id=response_id,
            prompts=[prompt for prompt in prompts for _ in range(each)],
            params=choices * len(prompts),
            num_choices=each,
            echo=[text for text in echo for _ in range(each)],
            options=options,
            report=body.speculative.report or body.speculative.explain,
            wants_ids=bool(body.return_token_ids),
            wants_usage=body.continuous_usage,
            pace=self._pace,
            charge=None if admission is None else admission.charge,
            shows_trees=body.speculative.explain,
            spans=spans,
            deadline=None if timeout is None else asyncio.get_running_loop().time() + timeout,
        )

    def _spans(
        self, request: Request, body: GenerationRequest, response_id: str
    ) -> RequestSpans | None:
        """The spans of a request that is sampled."""
        if self._tracer is None:
            return None
        operation = "text_completion" if isinstance(body, CompletionRequest) else "chat"
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.response.model": self._model.name,
            "gen_ai.response.id": response_id,
            "draftline.request_id": request.scope.get("state", {}).get("request_id", ""),
        }
        return self._tracer.begin(request.headers, attributes)

    def _params(self, body: GenerationRequest, prompts: Prompts, most: int) -> SamplingParams:
        """The sampling; 400 where prompt and answer do not fit the context of `most` tokens."""
        field, limit = body.token_limit
        # A default gives way to a long prompt.
        asked = limit if field in body.model_fields_set or limit == 0 else None
        is_narrow = most < self._engine_client.max_model_len
        holder = f"the context of {most} that this key allows (max_context)" if is_narrow else ""
        lengths = set(map(len, prompts))
        room = min(answer_room(length, most, {field: asked}, holder) for length in lengths)
        if limit is None:
            return body.sampling_params(room if is_narrow else None)
        return body.sampling_params(min(limit, room))


def _choices(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Several answers to one prompt: each has a seed of its own, the first the given one."""
    if params.seed is None:
        return [params] * count
    seeds = [(params.seed + index) % (MAX_SEED + 1) for index in range(count)]
    return [replace(params, seed=seed) for seed in seeds]


# What is posted: the kind of its body, and what answers it.
POSTS: Mapping[
    str, tuple[type[Any], Callable[[ModelRoutes, Request, Any], Awaitable[Response]]]
] = {
    "/v1/completions": (CompletionRequest, ModelRoutes.completions),
    "/v1/chat/completions": (ChatRequest, ModelRoutes.chat_completions),
    "/v1/responses": (ResponsesRequest, ModelRoutes.responses),
    "/v1/messages": (MessagesRequest, ModelRoutes.messages),
    "/v1/messages/count_tokens": (CountTokensRequest, ModelRoutes.count_tokens),
    "/tokenize": (TokenizeRequest, ModelRoutes.tokenize),
    "/detokenize": (DetokenizeRequest, ModelRoutes.detokenize),
}
BODIES: Mapping[str, type[RequestModel]] = {path: kind for path, (kind, _) in POSTS.items()}
# Routes over stored responses; this server stores none.
RESPONSE_PATHS = (
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}/cancel", "POST"),
    ("/v1/responses/{response_id}/input_items", "GET"),
)


def add_post_routes(
    app: FastAPI, models: Iterable[ServedModel], bodies: Bodies, tracer: RequestTracer | None
) -> None:
    """Add all of them. `tracer` makes spans of requests."""
    routes = {model.name: ModelRoutes(model, tracer) for model in models}
    for path in POSTS:
        _add_post_route(app, path, routes, bodies)
    for path, method in RESPONSE_PATHS:
        app.add_api_route(path, find, methods=[method])


def _add_post_route(
    app: FastAPI, path: str, routes: Mapping[str, ModelRoutes], bodies: Bodies
) -> None:
    kind, answer = POSTS[path]

    async def post(request: Request) -> Response:
        body, model = await bodies.read(request, kind)
        response = await answer(routes[model.name], request, body)
        return name_ignored(response, body.ignored_fields)

    app.add_api_route(
        path, post, methods=["POST"], name=answer.__name__, description=answer.__doc__
    )


async def find(response_id: str) -> Response:
    """404: responses are not stored."""
    raise ApiError(
        HTTPStatus.NOT_FOUND,
        f"{response_id!r} is not here: this server keeps no responses; send the whole "
        "conversation as input of the next one",
        param="response_id",
    )
