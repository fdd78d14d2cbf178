"""Limits on HTTP connections that hold before a caller is known.

uvicorn's protocol over httptools reads headers of any size without a timeout, takes any number of
connections, and buffers what a client does not read. `BoundedProtocol` is that protocol with limits
on bytes, time and number. Parsing stays uvicorn's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import RETRY_AFTER_S, ApiError

logger = logging.getLogger(__name__)

# What a client still sends after its request was answered is read and dropped for so long, so that
# it finds the answer and not a reset connection.
LINGER_S = 5.0
# Requests that may be read while an earlier one of the same connection is answered.
MAX_PIPELINED = 16
# Of each piece of a chunked body, so much may be framing.
FRAMING_BYTES = 32
# Of a request's line and headers, and how many headers: more gets a 431.
MAX_HEADER_BYTES, MAX_HEADERS = 32 * 1024, 100
# From a connection's start to the end of the headers; then a 408.
HEADER_TIMEOUT_S = 10.0
# A client that reads nothing for so long is disconnected, its request cancelled.
WRITE_TIMEOUT_S = 30.0
# A connection that is idle for so long between two requests is closed.
KEEP_ALIVE_TIMEOUT_S = 75.0


class ConnectionPool:
    """The open connections of one server; of the idle ones, the longest idle stands first.

    max_connections  open at once; one more closes the one that has been idle longest
    max_body_bytes   of a refused request, as many are read and dropped
    """

    def __init__(self, max_connections: int, max_body_bytes: int) -> None:
        self.max_connections, self.max_body_bytes = max_connections, max_body_bytes
        self._open: set[BoundedProtocol] = set()
        self._idle: dict[BoundedProtocol, None] = {}

    @property
    def num_open(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def enter(self, connection: BoundedProtocol) -> bool:
        """Take a new connection; False if all others are busy and there is no room."""
        if len(self._open) >= self.max_connections:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.close()
        self._open.add(connection)
        self.rest(connection)
        return True

    def rest(self, connection: BoundedProtocol) -> None:
        """The connection has no request that runs."""
        if connection in self._open:
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def work(self, connection: BoundedProtocol) -> None:
        """A request of the connection runs."""
        self._idle.pop(connection, None)

    def leave(self, connection: BoundedProtocol) -> None:
        """The connection is closed, or about to be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


class _RefusedError(Exception):
    """Stops the parser from within one of its callbacks."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection under the limits of its pool."""

    def __init__(self, *, pool: ConnectionPool, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._pool = pool
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # Bytes of this request that were not its body.
        self._num_head_bytes = 0
        # Bytes that came after the request was answered.
        self._num_dropped = 0
        self._in_head = False
        self._running: RequestResponseCycle | None = None
        self._is_refused = False
        self._refusal = ApiError(HTTPStatus.BAD_REQUEST, "this is no valid HTTP request")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        _bound_unsent(transport, WRITE_TIMEOUT_S)
        if self._pool.enter(self):
            self._arm(HEADER_TIMEOUT_S, self._head_is_late)
            return
        self._refuse(
            ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the server has {self._pool.max_connections} connections, all of them busy",
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._pool.leave(self)
        self._disarm()
        self._end_write_timer()
        # uvicorn reports the last request; an earlier one may still run.
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._is_refused or (self.cycle is not None and self._is_lingering):
            self._num_dropped += len(data)
            if self._num_dropped > self._pool.max_body_bytes:
                self.transport.abort()
                return
        if self._is_refused:
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._is_refused and self._num_head_bytes > MAX_HEADER_BYTES:
            self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        self._arm(HEADER_TIMEOUT_S, self._head_is_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header and trailer."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = ApiError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request has more than {MAX_HEADERS} headers",
            )
            raise _RefusedError

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._refusal = self._head_too_large()
            raise _RefusedError
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _RefusedError
        self._in_head = False
        self._num_dropped = 0
        self._disarm()
        self._pool.work(self)
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        """Called by the parser for each piece of a body."""
        self._num_head_bytes = max(0, self._num_head_bytes - len(body) - FRAMING_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser at the last byte of a request."""
        self._num_head_bytes = 0
        was_lingering = self._is_lingering
        super().on_message_complete()
        if was_lingering:
            self.cycle.more_body = False
            self._wait_for_next()

    def on_response_complete(self) -> None:
        """Called by uvicorn when a request is answered."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm(WRITE_TIMEOUT_S, self.transport.abort)
        elif self.cycle.response_complete:
            self._wait_for_next()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Called by uvicorn when the parser gives up."""
        self._refuse(self._refusal)

    def pause_writing(self) -> None:
        """Called by asyncio when the client does not read what it is sent."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self._reader_is_slow)

    def resume_writing(self) -> None:
        """Called by asyncio when the client reads again."""
        super().resume_writing()
        self._end_write_timer()

    def close(self) -> None:
        """Close the connection once what was sent is read; drop what is not read in time."""
        if not self.transport.is_closing():
            self.transport.close()
            self._arm(WRITE_TIMEOUT_S, self.transport.abort)

    @property
    def _is_lingering(self) -> bool:
        """Whether the request was answered before all of it came."""
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    def _wait_for_next(self) -> None:
        self._pool.rest(self)
        if not self._in_head:
            seconds = LINGER_S if self._is_lingering else KEEP_ALIVE_TIMEOUT_S
            self._arm(seconds, self.close)

    def _head_is_late(self) -> None:
        if self._num_head_bytes:
            self._refuse(
                ApiError(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"the headers took longer than {HEADER_TIMEOUT_S:g} s",
                )
            )
        else:
            self.close()

    def _head_too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the headers have more than {MAX_HEADER_BYTES} bytes",
        )

    def _reader_is_slow(self) -> None:
        logger.warning("event=client_does_not_read seconds=%g", WRITE_TIMEOUT_S)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer, ignore further input, and close."""
        self._is_refused = True
        self._pool.leave(self)
        running = self._running
        if self.pipeline or (running is not None and running.response_started):
            # Another answer is on its way, which this one would be taken for a part of.
            self.transport.abort()
            return
        if running is not None:
            # The request of which too much came, or something that is no HTTP: it is over.
            running.disconnected = True
            running.message_event.set()
        if not self.transport.is_closing():
            self.transport.write(_answer(error))
            self.transport.write_eof()
            self._arm(LINGER_S, self.transport.abort)

    def _arm(self, seconds: float, call: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, call)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _bound_unsent(transport: asyncio.Transport, seconds: float) -> None:
    """Have the system end a connection whose peer takes nothing, or is gone, for so long."""
    connection = cast("socket.socket | None", transport.get_extra_info("socket"))
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if connection is not None and option is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))


def _answer(error: ApiError) -> bytes:
    status = HTTPStatus(error.status)
    body = json.dumps(error.body, separators=(",", ":")).encode()
    headers = error.headers | {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
