"""A network between processes of this machine that can be made slow."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Self

PIECE_BYTES = 16_384


class Network:
    """Carries connections to a port. Runs within `with`.

    delay_s  each piece of at most 16 KiB takes so long, one after the other in each direction
    """

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.delay_s = 0.0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target)
        except OSError:
            # As a port that nobody listens at: the other side hears of it at once.
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
        back.start()
        self._carry(near, far)
        back.join()
        near.close()
        far.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                time.sleep(self.delay_s)
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
