"""Server-sent events, the JSON in them, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....cluster.loop_calls import off_loop
from ..generation.job import Piece

T = TypeVar("T")

DONE = "[DONE]"
# So many values are written in about a millisecond.
INLINE_VALUES = 2_000
# No model has this name.
_MARK = uuid.uuid4().hex
_INDEX = uuid.uuid4().int


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


class LazyList:
    """A long list in a body: `make` of each of the values, called when it is written.

    No dataclass: pydantic would look into it.
    """

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[Any], Any], values: Sequence[Any]) -> None:
        self._make = make
        self._values = values

    def plain(self) -> list[_Part]:
        """The list that the encoder writes."""
        return [_Part(self._make, value) for value in self._values]


class _Part:
    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[Any], Any], value: Any) -> None:
        self._make = make
        self._value = value

    def plain(self) -> Any:
        return self._make(self._value)


def write_json(value: Any) -> str:
    """Compact JSON of plain values and `LazyList`s."""
    return _ENCODER.encode(value)


def write_object(fields: Mapping[str, Any]) -> str:
    """Compact JSON of an object, whose own long lists are written in slices."""
    parts = [f"{write_json(name)}:{_write_field(value)}" for name, value in fields.items()]
    return f"{{{','.join(parts)}}}"


def _write_field(value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        return write_json(value)
    starts = range(0, len(value), INLINE_VALUES)
    slices = [write_json(value[start : start + INLINE_VALUES])[1:-1] for start in starts]
    return f"[{','.join(slices)}]"


async def json_response(fields: Mapping[str, Any], num_values: int) -> Response:
    """A response of a JSON object with so many values in it."""
    if num_values <= INLINE_VALUES:
        content = write_object(fields).encode()
    else:
        content = await off_loop(lambda: write_object(fields).encode())
    return Response(content, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, LazyList | _Part):
        return value.plain()
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)


_TEXT, _REASON = f"text-{_MARK}", f"reason-{_MARK}"


class ChunkTemplate:
    """Chunks of plain pieces, as one full way of making them makes them, at a hundredth of its
    time."""

    __slots__ = ("_parts",)

    def __init__(self, make: Callable[[int, Piece], str]) -> None:
        """`make` gives the JSON of the chunk of a piece of choice `index`."""
        piece: Any = Piece(
            text=_TEXT,
            finish_reason=_REASON,  # pyright: ignore[reportArgumentType] - stands for any
            is_first=False,
            echo=None,
            prompt_ids=(),
            log_probs=None,
            prompt_log_probs=None,
        )
        self._parts = re.split(f'("{_TEXT}"|"{_REASON}"|{_INDEX})', make(_INDEX, piece))

    def chunk(self, index: int, piece: Piece) -> str:
        """The chunk's JSON; `piece` must be plain and not the first of its answer."""
        values = {
            f'"{_TEXT}"': json.dumps(piece.text, ensure_ascii=False),
            f'"{_REASON}"': json.dumps(piece.finish_reason),
            str(_INDEX): str(index),
        }
        return "".join([values.get(part, part) for part in self._parts])
