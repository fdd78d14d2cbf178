"""Reads the bodies of requests and finds the model that they name, the same way for every route."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Request, Response

from ....cluster.loop_calls import collector_paused, off_loop
from ...settings.limits import RequestLimits
from ...settings.settings import ServerConfig
from ..http.callers import caller_of
from ..http.middleware import read_body
from ..schema.messages import CountTokensRequest, MessagesRequest
from ..schema.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ..schema.request_models import RequestModel
from ..schema.responses import ResponsesRequest
from .models import ServedModel, ServedModels

# What is posted, by path.
BODIES: dict[str, type[RequestModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
RequestT = TypeVar("RequestT", bound=RequestModel)

# Reading and checking so many bytes takes about a millisecond.
INLINE_BYTES = 16_384
logger = logging.getLogger(__name__)
HEADER = "x-draftline-ignored-fields"
MAX_NAMES = 16
MAX_NAME_CHARS = 64
MAX_LOGGED_NAMES = 256
LOG_PERIOD_S = 60.0


class Bodies:
    """Bodies of requests to a server's models."""

    def __init__(self, config: ServerConfig, models: ServedModels) -> None:
        self._config = config
        self._models = models
        self._ignored = IgnoredFields(time.monotonic)

    async def read(self, request: Request, kind: type[RequestT]) -> tuple[RequestT, ServedModel]:
        """The body as a request of this kind, and the model that it is for.

        Raises `ApiError` 400, 403, 404 or 413.
        """
        data = await read_body(request, self._config.max_body_bytes)
        body = await self._parse(kind, data)
        caller = caller_of(request)
        model = self._models.find(getattr(body, "model", None), caller)
        caller.check_priority(getattr(body, "priority", None) or 0)
        return body, model

    async def _parse(self, kind: type[RequestT], data: bytes) -> RequestT:
        limits, ignores = self._config.limits, self._config.ignore_unknown_fields
        if len(data) <= INLINE_BYTES:
            return kind.parse(data, limits, ignore_unknown=ignores)
        return await off_loop(_parse_large, kind, data, limits, ignores=ignores)

    def name_ignored(self, response: Response, body: RequestModel) -> Response:
        """The response to this body, which names the fields that were left out."""
        return self._ignored.add_header(response, body.ignored_fields)


def _parse_large(
    kind: type[RequestT], data: bytes, limits: RequestLimits, *, ignores: bool
) -> RequestT:
    with collector_paused():
        return kind.parse(data, limits, ignore_unknown=ignores)


class IgnoredFields:
    """Names ignored fields in a header of the answer, and in the log now and then.

    Names come from clients: what cannot stand in a header is replaced, and lists are cut. Values
    are never reported.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._logged_at: float | None = None
        self._unlogged: dict[str, None] = {}

    def add_header(self, response: Response, names: Sequence[str]) -> Response:
        """The same response with the header, where anything was ignored."""
        if not names:
            return response
        spelled = list(dict.fromkeys(map(_spell, names)))
        more = ["..."] if len(spelled) > MAX_NAMES else []
        response.headers[HEADER] = ", ".join([*spelled[:MAX_NAMES], *more])
        self._log(spelled[:MAX_NAMES])
        return response

    def _log(self, names: Sequence[str]) -> None:
        if len(self._unlogged) < MAX_LOGGED_NAMES:
            self._unlogged.update(dict.fromkeys(names))
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= LOG_PERIOD_S:
            logger.warning("event=fields_ignored names=%s", ",".join(self._unlogged))
            self._logged_at = now
            self._unlogged.clear()


def _spell(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:MAX_NAME_CHARS])
