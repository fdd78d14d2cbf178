"""`draftline serve`: one model behind the OpenAI API until a signal comes."""

from __future__ import annotations

import json
import os
import shlex
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .... import __version__
from ....cluster.config import EngineConfig
from ....core.errors import ConfigError
from ...engine.placement import stages_have_gpu
from ...observe.log_format import use_form
from ...observe.otlp import require_exporter
from ...ray_serve.runtime import exits_within, quiet_libraries, serve_on_ray, short_reports
from ...settings.settings import KEY_VARIABLE, ServeArgs, build_serve_args, require_keys
from ...tenants import check_tenant_store
from ..progress import progress
from .listening import bind, free_port

# From the end of Ray to that of the process.
EXIT_S = 10.0

# A prompt that the bundled model continues well.
EXAMPLE = {
    "prompt": "def load_config(path):", "max_tokens": 36, "temperature": 0.5, "seed": 4
}  # fmt: skip
CHAT_EXAMPLE = {
    "messages": [{"role": "user", "content": "Write a recipe for pancakes."}], "max_tokens": 64
}  # fmt: skip


def run_server(settings: Mapping[str, Any], ray_address: str | None, console: Console) -> None:
    """Serve until SIGINT or SIGTERM. Raises `DraftlineError` for what is wrong at start."""
    quiet_libraries()
    args = build_serve_args(settings)
    use_form(args.server.log_format)
    require_exporter(args.server)
    require_keys(args.server, args.server.host)
    check_tenant_store(args.server)
    # Only digests are needed from here on; child processes must not inherit the keys.
    os.environ.pop(KEY_VARIABLE, None)
    # Before the model is loaded or downloaded.
    with bind(args.server) as listener:
        bound = with_port(args, listener.getsockname()[1])
        _introduce(bound, console)
        if bound.engine.backend == "ray":
            # Ray Serve's proxy listens, in half a minute: on a port that nobody takes meanwhile.
            listener.close()
            bound = with_port(args, free_port(args.server))
            _serve_on_ray(bound, ray_address, console)
            # Ray has threads that the interpreter waits for.
            exits_within(EXIT_S)
        elif bound.server.api_processes:
            _serve_split(bound, listener, console)
        else:
            _serve_here(bound, listener, console)
    console.print("stopped")


def _introduce(args: ServeArgs, console: Console) -> None:
    """Print what is started. Raises `DraftlineError` first for mistakes in the settings."""
    # Imported late: it takes seconds, and a port in use should be reported at once.
    from ....cluster.engine.assembly import plan_model  # noqa: PLC0415
    from ...api.start_notes import engine_notes, server_notes  # noqa: PLC0415
    from ...engine.placement import stages_have_gpu  # noqa: PLC0415

    plan_model(args.engine, has_gpu=stages_have_gpu(args.engine))
    console.print(describe(args))
    for note in (*engine_notes(args.engine), *server_notes(args)):
        console.print(note, markup=False)


def describe(args: ServeArgs) -> str:
    """One line that says what is started."""
    engine = args.engine
    drafters = ", ".join(drafter.source for drafter in engine.drafters) or "none"
    stages = engine.pipeline_parallel_size
    return (
        f"draftline {__version__} · model {args.model_name} · "
        f"{stages} stage{'s' if stages > 1 else ''} · drafters {drafters} · {engine.backend}"
    )


def base_url(args: ServeArgs) -> str:
    """Where clients of this machine reach the server."""
    host = args.server.host
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{args.server.port}"


def curl_line(args: ServeArgs) -> str:
    """A curl command that works as printed, but for the key, which is not shown."""
    from ....models.load.checkpoint import answers_chats  # noqa: PLC0415 - loads torch

    is_chat = answers_chats(args.engine.model)
    path, example = ("chat/completions", CHAT_EXAMPLE) if is_chat else ("completions", EXAMPLE)
    body = {"model": args.model_name, **example}
    parts = ["curl", f"{base_url(args)}/v1/{path}", "-H", "Content-Type: application/json"]
    if args.server.has_keys:
        parts += ["-H", "Authorization: Bearer KEY"]
    return shlex.join([*parts, "-d", json.dumps(body)])


def with_port(args: ServeArgs, port: int) -> ServeArgs:
    """`args` with the port that is bound."""
    return replace(args, server=args.server.model_copy(update={"port": port}))


def _serve_here(args: ServeArgs, listener: socket.socket, console: Console) -> None:
    # Each takes a second to import, which the other backend need not wait for.
    from ...api.app import create_app  # noqa: PLC0415
    from ...api.engine_client import LocalEngineClient  # noqa: PLC0415
    from ...api.http.connections import ConnectionPool  # noqa: PLC0415
    from ...api.http.middleware import Drain  # noqa: PLC0415
    from ...engine.async_engine import AsyncEngine  # noqa: PLC0415
    from .local_server import Shutdown, serve_local  # noqa: PLC0415

    failure: Future[str] = Future()
    engine = AsyncEngine(
        args.engine,
        on_failure=failure.set_result,
        usage_log=args.server.usage_log,
        progress=progress,
    )
    engine_client = LocalEngineClient(engine)
    shutdown = Shutdown(
        drain=Drain(),
        timeout_s=args.server.drain_timeout_s,
        end_rest=engine_client.close,
        on_drain=lambda count: _print_draining(count, args, console),
        failure=failure,
    )
    app = create_app(
        engine_client, args.server, args.model_name, drain=shutdown.drain, engine=args.engine
    )
    pool = ConnectionPool(args.server.max_connections, args.server.max_body_bytes)
    serve_local(app, listener, pool, lambda: _print_ready(args, console), shutdown)


def _serve_split(args: ServeArgs, listener: socket.socket, console: Console) -> None:
    # It takes a second to import, which the other ways of serving need not wait for.
    from .split_server import SplitServer  # noqa: PLC0415

    SplitServer(
        args,
        listener,
        on_ready=lambda: _print_ready(args, console),
        on_drain=lambda count: _print_draining(count, args, console),
    ).serve()


def _serve_on_ray(args: ServeArgs, ray_address: str | None, console: Console) -> None:
    for index, drafter in enumerate(args.engine.drafters):
        pool = drafter.drafter_pool
        if ray_address is None and pool is not None and pool not in args.pools:
            raise ConfigError(
                f"drafters[{index}].drafter_pool",
                f"{pool!r} is not under pools; or --ray-address names a cluster that has it",
            )
    if ray_address is None:
        compile_cpu_kernels(args.engine)
    console.print("starting Ray and the stages (about half a minute on a small machine)")
    # A signal also ends the start.
    with (
        suppress(KeyboardInterrupt),
        short_reports(),
        serve_on_ray(args, ray_address, with_logs=True),
    ):
        _print_ready(args, console)
        threading.Event().wait()


def _print_draining(count: int, args: ServeArgs, console: Console) -> None:
    requests = "one request" if count == 1 else f"{count} requests"
    seconds = args.server.drain_timeout_s
    console.print(f"waiting up to {seconds:g} s for {requests} (once more ends them)")


def _print_ready(args: ServeArgs, console: Console) -> None:
    page = f" and, for a browser, {base_url(args)}/ui" if args.server.live_page else ""
    console.print(f"ready: {base_url(args)}/v1{page} (ctrl-c stops it); try")
    console.print(curl_line(args), markup=False)


def compile_cpu_kernels(config: EngineConfig) -> None:
    """Compile the kernels that stages on this machine will load, unless they are there.

    Where that fails, the stages say why, and run torch's kernels.
    """
    if config.compile == "off" or config.dtype not in ("auto", "float32"):
        return
    # torch takes a second to import, which a port in use is to be reported before.
    from ....kernels.cpu.build import ensure_built  # noqa: PLC0415
    from ....models.device import choose_device  # noqa: PLC0415
    from ....models.stage.options import StageOptions  # noqa: PLC0415

    if choose_device(config.device, has_gpu=stages_have_gpu(config)) != "cpu":
        return
    with suppress(ConfigError):
        ensure_built(Path(StageOptions().compile_cache).expanduser(), progress)
