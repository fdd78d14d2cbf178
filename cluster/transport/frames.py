"""Messages between the coordinator and its stages: pickled values with a length before them.

Pickle is safe only between processes that trust each other, so the first bytes on a connection are
a secret of the run, checked before anything is unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from ...core.errors import ProtocolError

LENGTH = struct.Struct("!Q")
MAX_FRAME_BYTES = 1 << 30


def encode_frame(value: object) -> bytes:
    """One message."""
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with `data`. Raises `ProtocolError` above the limit."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + _checked_length(self._bytes)
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield pickle.loads(payload)


class FrameSender:
    """Sends messages whole, whichever thread has one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, value: object) -> None:
        """One message. Raises `ConnectionError`."""
        frame = encode_frame(value)
        with self._lock:
            self._connection.sendall(frame)


def receive_frame(connection: socket.socket) -> Any:
    """Wait for one message. Raises `EOFError` when the other side has closed."""
    length = _checked_length(_receive(connection, LENGTH.size))
    return pickle.loads(_receive(connection, length))


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other side closed the connection")
        view = view[count:]
    return data


def _checked_length(head: bytearray) -> int:
    (length,) = LENGTH.unpack_from(head)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length
