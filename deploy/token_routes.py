"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from fastapi import Request, Response

from .api.json_text import json_response
from .api.parsing import parse_body
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

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat."""
        data = await read_body(request, self._config.max_body_bytes)
        body = await parse_body(TokenizeRequest, data, self._config.limits)
        self._model.require(body.model)
        codec = self._face.codec
        if body.messages is not None:
            messages = [message.for_template() for message in body.messages]
            tokens = await codec.encode_chat(messages, generate=body.add_generation_prompt)
        else:
            tokens = await codec.encode(body.prompt or "", special=body.add_special_tokens)
        answer = {
            "count": len(tokens),
            "max_model_len": self._face.max_model_len,
            "tokens": tokens,
            "token_strs": await codec.token_strs(tokens) if body.return_token_strs else None,
        }
        return await json_response(answer, len(tokens))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        data = await read_body(request, self._config.max_body_bytes)
        body = await parse_body(DetokenizeRequest, data, self._config.limits)
        self._model.require(body.model)
        text = await self._face.codec.decode(body.tokens)
        return await json_response({"prompt": text}, len(body.tokens))
