"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = "[DONE]"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    The request's body must have been read. Raises `ClientDisconnect`, and what `work` raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `first` and then each text of `events` as one `data:` line.

    `events` was started by taking `first` from it: an error before the first event has an HTTP
    status of its own. It is closed however the response ends, at once when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        # Proxies must not hold tokens back.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        assert scope["type"] == "http", scope["type"]
        # A client that is gone needs no answer.
        with suppress(ClientDisconnect):
            async with aclosing(self._events):
                await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send(self._part(self._first))
        async for event in self._events:
            await send(self._part(event))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _part(self, event: str) -> dict[str, Any]:
        body = self._frame(event).encode()
        return {"type": "http.response.body", "body": body, "more_body": True}

    def _frame(self, event: str) -> str:
        return f"data: {event}\n\n"


class FramedEventStream(EventStream):
    """The same for events that come with the lines around their data."""

    def _frame(self, event: str) -> str:
        return event
