"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI, Request, Response

from ..output.json_parts import json_response
from ..schema.protocol import DetokenizeRequest, TokenizeRequest
from ..tools.chat_plan import ChatPlanner
from .bodies import Bodies
from .models import ServedModel


def add_text_routes(app: FastAPI, models: Iterable[ServedModel], bodies: Bodies) -> None:
    """Add both, each of the model that a body names."""
    tokens = {model.name: TokenRoutes(model) for model in models}

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


class TokenRoutes:
    """The routes over a model's tokenizer."""

    def __init__(self, model: ServedModel) -> None:
        self._engine_client = model.source.engine_client
        self._config = model.source.config

    async def tokenize(self, body: TokenizeRequest) -> Response:
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

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        answer = {"prompt": await self._engine_client.codec.decode(body.tokens)}
        return await json_response(answer, len(body.tokens))
