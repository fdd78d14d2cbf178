"""The routes whose bodies name a model: each is answered by that model's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response

from ..schema.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ..schema.request_models import RequestModel
from ..schema.responses import ResponsesRequest
from .bodies import Bodies
from .generation import GenerationRoutes
from .models import ServedModel
from .responses import ResponsesRoutes, find
from .text import TokenRoutes

if TYPE_CHECKING:
    from ...observe.spans import RequestTracer

BODIES: dict[str, type[RequestModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# Routes over stored responses; this server stores none.
RESPONSE_PATHS = (
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}/cancel", "POST"),
    ("/v1/responses/{response_id}/input_items", "GET"),
)


def add_text_routes(
    app: FastAPI, models: Iterable[ServedModel], bodies: Bodies, tracer: RequestTracer | None
) -> None:
    """Add all of them. `tracer` makes spans of requests."""
    models = list(models)
    generation = {model.name: GenerationRoutes(model, tracer) for model in models}
    responses = {model.name: ResponsesRoutes(model, generation[model.name]) for model in models}
    tokens = {model.name: TokenRoutes(model) for model in models}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        body, model = await bodies.read(request, CompletionRequest)
        answer = await generation[model.name].completions(request, body)
        return bodies.name_ignored(answer, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer the last message of a chat."""
        body, model = await bodies.read(request, ChatRequest)
        answer = await generation[model.name].chat_completions(request, body)
        return bodies.name_ignored(answer, body)

    @app.post("/v1/responses")
    async def create(request: Request) -> Response:
        """Answer a text or the items of a conversation."""
        body, model = await bodies.read(request, ResponsesRequest)
        answer = await responses[model.name].create(request, body)
        return bodies.name_ignored(answer, body)

    for path, method in RESPONSE_PATHS:
        app.add_api_route(path, find, methods=[method])
    _add_token_routes(app, tokens, bodies)


def _add_token_routes(app: FastAPI, tokens: dict[str, TokenRoutes], bodies: Bodies) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a chat."""
        body, model = await bodies.read(request, TokenizeRequest)
        return bodies.name_ignored(await tokens[model.name].tokenize(body), body)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body, model = await bodies.read(request, DetokenizeRequest)
        return bodies.name_ignored(await tokens[model.name].detokenize(body), body)
