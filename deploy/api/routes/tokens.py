"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from fastapi import Request, Response

from ...settings.settings import ServerConfig
from ..engine_client import EngineClient
from ..generation.chat_plan import ChatPlanner
from ..output.event_stream import json_response
from ..schema.protocol import DetokenizeRequest, TokenizeRequest
from .bodies import Bodies


class TokenRoutes:
    """The routes over a model's tokenizer."""

    def __init__(self, engine_client: EngineClient, config: ServerConfig, bodies: Bodies) -> None:
        self._engine_client = engine_client
        self._config = config
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat."""
        body = await self._bodies.read(request, TokenizeRequest)
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
        return self._bodies.name_ignored(await json_response(answer, len(tokens)), body)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self._bodies.read(request, DetokenizeRequest)
        answer = {"prompt": await self._engine_client.codec.decode(body.tokens)}
        return self._bodies.name_ignored(await json_response(answer, len(body.tokens)), body)
