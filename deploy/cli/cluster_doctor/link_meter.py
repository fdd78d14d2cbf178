"""How long a small message takes from one machine to another, and how many bytes a second pass."""

from __future__ import annotations

import hmac
import secrets
import socket
import statistics
import threading
import time
from dataclasses import dataclass

TOKEN_BYTES = 32
SMALL, ROUNDS = 64, 200
BLOCK, NUM_BLOCKS = 2**20, 64
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds one way of a message of 64 bytes, the median; bytes a second of 64 MiB."""

    latency_s: float
    bandwidth: float


class LinkServer:
    """Echoes small messages and swallows large ones of one connection that shows its token."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of this address."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), backlog=1)
        self._listener.settimeout(TIMEOUT_S)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            with self._listener, self._listener.accept()[0] as connection:
                _prepare(connection)
                if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), self.token):
                    return
                for _ in range(ROUNDS):
                    connection.sendall(_receive(connection, SMALL))
                for _ in range(NUM_BLOCKS):
                    _receive(connection, BLOCK)
                connection.sendall(b"!")
        # The other side tells of it.
        except OSError:
            return

    def close(self) -> None:
        """Wait for the end of the measurement, which has a bound of its own."""
        self._thread.join(TIMEOUT_S)


def measure_link(host: str, port: int, token: bytes) -> Measured:
    """Measure the way to a `LinkServer`. Raises `OSError`."""
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        _prepare(connection)
        connection.sendall(token)
        rounds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            connection.sendall(bytes(SMALL))
            _receive(connection, SMALL)
            rounds.append(time.perf_counter() - start)
        block = bytes(BLOCK)
        start = time.perf_counter()
        for _ in range(NUM_BLOCKS):
            connection.sendall(block)
        _receive(connection, 1)
        seconds = time.perf_counter() - start
    return Measured(statistics.median(rounds) / 2, NUM_BLOCKS * BLOCK / seconds)


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes; raises `ConnectionError` where fewer come."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), BLOCK))
        if not part:
            raise ConnectionError("the other side hung up")
        parts += part
    return bytes(parts)
