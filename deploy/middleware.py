"""What happens around every route: request ids, API keys, a limit on bodies."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Collection
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LEN = 128
# Load balancers and Kubernetes probes come without a key.
OPEN_PATHS = frozenset({"/health", "/ping"})


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


class ApiKeys:
    """401 without one of `keys` as bearer token; everything is open when there are no keys."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        guarded = scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS
        if guarded and not self._allows(Headers(scope=scope).get("authorization", "")):
            error = ApiError(
                HTTPStatus.UNAUTHORIZED, "missing or wrong API key; send Authorization: Bearer KEY"
            )
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        key = given.strip().encode()
        # All keys are compared, each in constant time.
        matches = [secrets.compare_digest(key, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


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
