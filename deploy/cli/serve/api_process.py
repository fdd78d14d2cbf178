"""A process of the HTTP API: templates, tokens, texts and streams beside the engine's process.

    python -m draftline.deploy.cli.serve.api_process --engine-fd N --listener-fd N

`draftline serve` starts it, with both sockets to inherit.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import socket
import sys
from typing import Any

from ....cluster.config import EngineConfig
from ....cluster.transport.messages import receive_frame
from ....core.errors import DraftlineError, ProtocolError
from ...api.app import create_app
from ...api.http.connections import ConnectionPool
from ...api.http.middleware import Drain
from ...engine_process.client import EngineMetrics, SocketEngineClient, SocketGate
from ...engine_process.messages import EngineSetup, decode_from_engine
from ...observe.log_format import set_up_logs
from ...ray_serve.runtime import quiet_libraries
from ...settings.settings import DeploymentConfig, ServeArgs, ServerConfig
from .local_server import Shutdown, serve_local

logger = logging.getLogger(__name__)

# Connections that a process accepts at once; few, so that processes get equal parts of a burst.
ACCEPTS_AT_ONCE = 1


def packed_settings(args: ServeArgs) -> bytes:
    """The settings for an API process, as JSON; keys as digests only, already read."""
    server = args.server.model_dump(mode="json")
    for fields in (server, *server["tenants"]):
        # What they name was read by the process that starts the server.
        fields |= {name: [] for name in fields if name.endswith(("key_env", "key_file"))}
    return json.dumps({"server": server, "engine": args.engine.model_dump(mode="json")}).encode()


def read_settings(data: bytes) -> ServeArgs:
    """The settings from the JSON of `packed_settings`."""
    settings: dict[str, Any] = json.loads(data)
    return ServeArgs(
        engine=EngineConfig(**settings["engine"]),
        server=ServerConfig(**settings["server"]),
        deployment=DeploymentConfig(),
    )


def receive_setup(end: socket.socket) -> EngineSetup:
    """Wait for the engine process's first message. Raises `EOFError`, `ProtocolError`."""
    messages = decode_from_engine(bytes(receive_frame(end)))
    if len(messages) != 1 or not isinstance(messages[0], EngineSetup):
        raise ProtocolError("the first message from the engine's process is no setup")
    return messages[0]


def serve_api(end: socket.socket, listener: socket.socket, args: ServeArgs) -> None:
    """Serve until the engine's process sends the end, or is gone. Raises `EngineFailed`."""
    drain = Drain()

    def begin_draining() -> int:
        num_running = drain.num_running
        drain.begin()
        return num_running

    client = SocketEngineClient(
        end,
        args.engine.model,
        on_drain=begin_draining,
    )
    gate = None
    if args.server.rate_limit_store is None:
        gate = SocketGate(client, is_open=args.server.rate_limit_on_failure == "open")
    app = create_app(
        client,
        args.server,
        args.model_name,
        drain=drain,
        engine=args.engine,
        metrics=EngineMetrics(client),
        gate=gate,
    )
    shutdown = Shutdown(
        drain=drain,
        timeout_s=args.server.drain_timeout_s,
        end_rest=client.close,
        on_drain=lambda _count: None,
        failure=client.lost,
    )
    serve_local(
        app,
        listener,
        _pool(args.server),
        client.tell_serving,
        shutdown,
        accepts_at_once=ACCEPTS_AT_ONCE,
    )


def _pool(config: ServerConfig) -> ConnectionPool:
    """A pool for this process's part of the connections."""
    part = math.ceil(config.max_connections / max(config.api_processes, 1))
    return ConnectionPool(part, config.max_body_bytes)


def main() -> int:
    """Run the process; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-fd", type=int, required=True)
    parser.add_argument("--listener-fd", type=int, required=True)
    given = parser.parse_args()
    quiet_libraries()
    end, listener = socket.socket(fileno=given.engine_fd), socket.socket(fileno=given.listener_fd)
    try:
        setup = receive_setup(end)
        args = read_settings(setup.settings)
        set_up_logs(setup.log_level, args.server.log_format)
        serve_api(end, listener, args)
    except EOFError:
        return 1
    except DraftlineError as error:
        logger.error("event=api_process_ends reason=%r", str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
