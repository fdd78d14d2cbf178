"""What happens around every route: request ids, a limit on bodies."""

from __future__ import annotations

import uuid
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LEN = 128


class RequestIds:
    """Echoes the client's `x-request-id`, or makes one; handlers find it in `scope["state"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _usable(Headers(scope=scope).get(REQUEST_ID_HEADER)) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _usable(value: str | None) -> str | None:
    """The client's id if it can stand in a header and a log line."""
    if not value or len(value) > MAX_REQUEST_ID_LEN:
        return None
    return value if value.isascii() and value.isprintable() else None


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises `ApiError` 413 when it has more than `limit` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {limit} bytes"
            )
    return bytes(body)
