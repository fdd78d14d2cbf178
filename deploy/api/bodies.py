"""Reads the bodies of requests, one way for every route."""

from __future__ import annotations

import time
from typing import TypeVar

from fastapi import Request, Response

from ..middleware import read_body
from ..model_card import ServedModel
from ..request_models import RequestModel
from ..settings import ServerConfig
from .ignored_fields import IgnoredFields
from .parsing import parse_body

RequestT = TypeVar("RequestT", bound=RequestModel)


class Bodies:
    """Bodies of requests to one served model."""

    def __init__(self, config: ServerConfig, model: ServedModel) -> None:
        self._config = config
        self._model = model
        self._ignored = IgnoredFields(time.monotonic)

    async def read(self, request: Request, kind: type[RequestT]) -> RequestT:
        """The body as a request of this kind.

        Raises `ApiError` 400, 404 or 413, and `RequestError`.
        """
        config = self._config
        data = await read_body(request, config.max_body_bytes)
        body = await parse_body(
            kind, data, config.limits, ignore_unknown=config.ignore_unknown_fields
        )
        self._model.require(getattr(body, "model", None))
        return body

    def tell_ignored(self, response: Response, body: RequestModel) -> Response:
        """The response to this body, which names the fields that were left out."""
        return self._ignored.tell(response, body.ignored_fields)
