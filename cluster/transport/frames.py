"""Cuts a stream of bytes between the coordinator and its stages into messages.

A message has its length before it. Whoever cannot show a secret of the run is cut off at its first
bytes (`distributed.py`), before any length or message of it is read.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

from ...core.errors import ProtocolError

LENGTH = struct.Struct("!Q")
MAX_FRAME_BYTES = 1 << 30


def encode_frame(message: bytes) -> bytes:
    """One message with its length."""
    return LENGTH.pack(len(message)) + message


class FrameBuffer:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with `data`. Raises `ProtocolError` above the limit."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + _checked_length(self._bytes)
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield message


class FrameSender:
    """Sends messages whole, whichever thread has one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """One message. Raises `ConnectionError`."""
        frame = encode_frame(message)
        with self._lock:
            self._connection.sendall(frame)


def receive_frame(connection: socket.socket) -> bytearray:
    """Wait for one message.

    Raises `EOFError` when the other side has closed, `ProtocolError` above the limit.
    """
    length = _checked_length(_receive(connection, LENGTH.size))
    return _receive(connection, length)


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
