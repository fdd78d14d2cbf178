"""The end of a server in good order: no new requests, and time for those that run."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RETRY_AFTER_S, ApiError


class Drain:
    """Counts the requests that run and knows whether new ones are taken. One event loop uses it."""

    def __init__(self) -> None:
        self.num_running = 0
        self._begun = asyncio.Event()
        # Set when there is nothing more to wait for.
        self._over = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Refuse new requests; called again, wait no longer for those that run."""
        if self.is_draining or not self.num_running:
            self._over.set()
        self._begun.set()

    def enter(self) -> None:
        """A request begins."""
        self.num_running += 1

    def leave(self) -> None:
        """A request has been answered, or its client has left."""
        self.num_running -= 1
        if self.is_draining and not self.num_running:
            self._over.set()

    async def begun(self) -> None:
        """Wait for `begin`."""
        await self._begun.wait()

    async def finish(self, timeout_s: float) -> bool:
        """Wait until no request runs, `begin` is called again or the time is over.

        False if requests run still.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout_s)
        return not self.num_running

    def refusal(self) -> ApiError:
        """What a request is told that comes too late."""
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the server is shutting down, please retry",
            retry_after_s=RETRY_AFTER_S,
        )


class RefuseWhileDraining:
    """503 for every new POST once the server drains. What only asks is answered to the end."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._drain.is_draining:
            error = self._drain.refusal()
            # A connection that is kept would lead the client here again.
            headers = error.headers | {"Connection": "close"}
            await JSONResponse(error.body, error.status, headers)(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()
