"""Reads the bodies of requests, one way for every route."""

from __future__ import annotations

import time
from typing import TypeVar

from fastapi import Request, Response

from ....cluster.loop_calls import collector_paused, off_loop
from ...settings.limits import RequestLimits
from ...settings.settings import ServerConfig
from ..http.callers import caller_of
from ..http.middleware import read_body
from ..schema.request_models import RequestModel
from .ignored_fields import IgnoredFields
from .model_card import ServedModel

RequestT = TypeVar("RequestT", bound=RequestModel)

# Reading and checking so many bytes takes about a millisecond.
INLINE_BYTES = 16_384


class Bodies:
    """Bodies of requests to one served model."""

    def __init__(self, config: ServerConfig, model: ServedModel) -> None:
        self._config = config
        self._model = model
        self._ignored = IgnoredFields(time.monotonic)

    async def read(self, request: Request, kind: type[RequestT]) -> RequestT:
        """The body as a request of this kind. Raises `ApiError` 400, 404 or 413."""
        data = await read_body(request, self._config.max_body_bytes)
        body = await self._parse(kind, data)
        self._model.require(getattr(body, "model", None))
        caller_of(request).check_priority(getattr(body, "priority", None) or 0)
        return body

    async def _parse(self, kind: type[RequestT], data: bytes) -> RequestT:
        limits, ignores = self._config.limits, self._config.ignore_unknown_fields
        if len(data) <= INLINE_BYTES:
            return kind.parse(data, limits, ignore_unknown=ignores)
        return await off_loop(_parse_large, kind, data, limits, ignores=ignores)

    def name_ignored(self, response: Response, body: RequestModel) -> Response:
        """The response to this body, which names the fields that were left out."""
        return self._ignored.tell(response, body.ignored_fields)


def _parse_large(
    kind: type[RequestT], data: bytes, limits: RequestLimits, *, ignores: bool
) -> RequestT:
    with collector_paused():
        return kind.parse(data, limits, ignore_unknown=ignores)
