"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from .api.chat_plan import ChatPlanner
from .engine_face import EngineFace
from .middleware import read_body
from .model_card import ServedModel
from .protocol import DetokenizeRequest, TokenizeRequest
from .settings import ServerConfig


class TokenRoutes:
    """The routes over a model's tokenizer."""

    def __init__(self, face: EngineFace, config: ServerConfig, model: ServedModel) -> None:
        self._face = face
        self._config = config
        self._model = model

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Token ids of a text or of a chat."""
        body = TokenizeRequest.parse(await read_body(request, self._config.max_body_bytes))
        self._model.require(body.model)
        codec = self._face.codec
        if body.messages is not None:
            tokens = await ChatPlanner(codec, self._config).encode(body, body.messages)
        else:
            tokens = await codec.encode(body.prompt or "", special=body.add_special_tokens)
        return {
            "count": len(tokens),
            "max_model_len": self._face.max_model_len,
            "tokens": tokens,
            "token_strs": codec.token_strs(tokens) if body.return_token_strs else None,
        }

    async def detokenize(self, request: Request) -> dict[str, str]:
        """The text of token ids."""
        body = DetokenizeRequest.parse(await read_body(request, self._config.max_body_bytes))
        self._model.require(body.model)
        return {"prompt": self._face.codec.decode(body.tokens)}
