"""The gRPC server of one drafter: `python -m draftline.actors.drafter_server --config JSON`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial

from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.drafting.factory import build_drafter
from ..cluster.links.access import Access, TlsFiles
from ..cluster.links.service import DrafterLoad, DrafterService
from ..cluster.links.wire import DEFAULT_MAX_BYTES
from ..cluster.transport.stage_spec import end_process
from ..core.errors import ConfigError
from ..core.interfaces import Drafter
from .listener import (
    GrpcListener,
    add_listen_arguments,
    health_handler,
    listen_settings,
    run_server,
    serve_until_signal,
)


class DrafterServer:
    """Serves a drafter at host:port; port 0 lets the system choose one.

    Health checks of gRPC are answered, from its stop on with `NOT_SERVING`.

    access          which calls are allowed; None: all
    on_device_lost  see `DrafterService`
    """

    def __init__(
        self,
        drafter: Drafter,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: TlsFiles | None = None,
        access: Access | None = None,
        max_message_bytes: int = DEFAULT_MAX_BYTES,
        on_device_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._service = DrafterService(drafter, max_message_bytes, on_device_lost=on_device_lost)
        self._is_stopping = False
        # A coordinator's stream never ends by itself. A stream that is being cancelled needs a
        # moment; otherwise gRPC cancels it twice and prints a traceback.
        self._listener = GrpcListener(
            [self._service.handler(), health_handler(lambda: not self._is_stopping)],
            host,
            port,
            tls=tls,
            access=access,
            grace_s=0.2,
            max_message_bytes=max_message_bytes,
        )

    async def start(self) -> int:
        """Listen; the port. Raises `ConfigError` if it is taken or TLS files are missing."""
        return await self._listener.start()

    @property
    def num_open(self) -> int:
        """Number of open requests of all coordinators."""
        return self._service.num_open

    def read_work(self) -> DrafterLoad:
        """The work since the last call."""
        return self._service.read_work()

    async def stop(self, drain_s: float = 0.0) -> None:
        """End every connection, once no request is open or `drain_s` has passed."""
        self._is_stopping = True
        await self._service.drain(drain_s)
        await self._listener.stop()
        self._service.close()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors of the user end with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="draftline.actors.drafter_server", description=__doc__)
    parser.add_argument(
        "--config",
        required=True,
        metavar="JSON",
        help="the drafter's settings as a JSON object; -: the first line of standard input, since "
        "every user of a machine sees the arguments of its processes",
    )
    parser.add_argument("--target", help="the served model: refuse what was made for another")
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="end when standard input is closed"
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long requests may be finished, or opened at other servers, after SIGTERM",
    )
    add_listen_arguments(parser)
    given = parser.parse_args(arguments)

    async def serve() -> None:
        target = EngineConfig.model_validate({"model": given.target}) if given.target else None
        listening = listen_settings(given)
        config = _read_first_line() if given.config == "-" else given.config
        drafter = build_drafter(_parse_config(config), target)
        # The parent process starts another server.
        server = DrafterServer(drafter, **listening, on_device_lost=end_process)
        stop = partial(server.stop, given.drain_s)
        await serve_until_signal(server.start, stop, ends_with_stdin=given.end_with_stdin)

    return run_server("drafter_server", serve)


def _read_first_line() -> str:
    """Reads unbuffered: a buffer would keep the following bytes from later readers."""
    data = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        data += byte
    return data.decode()


def _parse_config(text: str) -> DrafterConfig:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError("config", f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("config", "must be a JSON object")
    return DrafterConfig(**values)


if __name__ == "__main__":
    sys.exit(main())
