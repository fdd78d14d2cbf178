"""Starts and stops Ray and Ray Serve quietly, around one application, and in bounded time."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

from ...core.errors import DraftlineError
from ..settings.settings import APP_NAME, ServeArgs, ServerConfig
from .deployment_plan import placement_bundles


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """End the process if the context lasts longer: exit status 1, and what each thread does on
    stderr.

    Ray waits without a limit for some answers of what may be gone. The limit holds whatever the
    process waits for, the interpreter's lock included; there is one at a time.
    """
    exits_within(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def exits_within(seconds: float) -> None:
    """End the process if it still runs then, likewise: for its last act, behind which the
    interpreter waits for threads of libraries without a limit."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


_REPORT = re.compile(
    r"A worker died or was killed while executing a task.*?Worker PID: (\d+)"
    r".*?Worker exit detail: (.*?)\.?(?: Some common causes include:.*)?(?=\x1b|\n|$)"
)


def shortened(text: str) -> str:
    """The text with what Ray reports of deaths cut short; what is worded otherwise stays."""
    return _REPORT.sub(r"process \1 died: \2", text)


@contextmanager
def short_reports() -> Iterator[None]:
    """Shorten what Ray prints on stdout, in a thread of its own, within the context."""
    with redirect_stdout(cast("TextIO", _Shortened(sys.stdout))):
        yield


class _Shortened:
    """A text stream before another."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Ray writes each report in one call."""
        return self._stream.write(shortened(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


logger = logging.getLogger(__name__)

# Ray gives a node 30 seconds to come up, which a busy machine may need more than once.
START_ATTEMPTS = 3
# Beyond the time of the requests: what it takes to end the rest, and to know that it ended.
DRAIN_SLACK_S = 10.0
# A request that ran out of time ends in the application; the proxy's own end is for what hangs.
PROXY_SLACK_S = 30.0
# From the last request's end to the process's: Ray itself, and a minute that Ray Serve gives each
# application.
END_S, APPLICATION_END_S = 10.0, 60.0
OBJECT_STORE_BYTES = 128 * 1024 * 1024
# Ray Serve gives its HTTP proxy up that is not ready after three times this long, by default 5 s,
# which a busy machine takes to start a process. The files under `deploy/` say it, too.
PROXY_READY_CHECK = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20"}
# Ray reads these when it is imported or started. They silence lines that are of no use to users,
# and give stages the priority of this process: Ray's default of nice 15 starves them on a machine
# that does anything else.
RAY_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # `draftline serve` has printed them.
    "RAY_DEDUP_LOGS_SKIP_REGEX": r"event\W+start_note",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    **PROXY_READY_CHECK,
}


def quiet_libraries() -> None:
    """Keep what libraries print at start off the terminal; before Ray is imported."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    warnings.filterwarnings("ignore", module=r"ray(\.|$)")
    for name in ("ray", "ray.serve", "transformers", "uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def serve_on_ray(
    args: ServeArgs, address: str | None = None, *, with_logs: bool = False
) -> Iterator[None]:
    """Deploys the application and its pools, and keeps them for as long as the context lasts.

    `address` names a running cluster (`auto`: the one of this machine); None starts one here, which
    ends with the context. `with_logs`: what all its processes log is printed here. Raises
    `ConfigError` and what deploying raises.
    """
    quiet_libraries()
    # Ray takes seconds to import, which `draftline --help` must not wait for.
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415
    from ray.serve.schema import LoggingConfig  # noqa: PLC0415

    quiet_libraries()
    encoding = "JSON" if args.server.log_format == "json" else "TEXT"
    logs = LoggingConfig(log_level="ERROR", enable_access_log=False, encoding=encoding)
    # A cluster that runs already has not read our environment.
    controller_options = {"runtime_env": {"env_vars": PROXY_READY_CHECK}} if address else None
    is_deployed = False
    try:
        _start_ray(args, address, with_logs=with_logs)
        serve.start(
            proxy_location="HeadOnly",
            http_options=http_options(args.server),
            logging_config=logs,
            controller_options=controller_options,
        )
        try:
            _deploy(args, logs)
        except RuntimeError as error:
            raise DraftlineError(f"Ray Serve could not deploy: {reason_of(error)}") from error
        is_deployed = True
        yield
    finally:
        if is_deployed:
            _drain(args.server.drain_timeout_s)
        names = (APP_NAME, *args.pools)
        with ends_within(END_S + APPLICATION_END_S * len(names)):
            # A cluster of our own ends with all that is in it; there, only what is up stops in
            # order.
            if is_deployed or (address is not None and ray.is_initialized()):
                for name in names:
                    _delete(name)
            ray.shutdown()


def _deploy(args: ServeArgs, logs: Any) -> None:
    """Start the pools, then the application, whose engines look for them."""
    from ray import serve  # noqa: PLC0415

    from .drafter_pool import build_pool  # noqa: PLC0415
    from .serve_app import build_app  # noqa: PLC0415

    for name, pool in args.pools.items():
        serve.run(build_pool(pool), name=name, route_prefix=None, logging_config=logs)
    serve.run(build_app(replace(args, pools={})), name=APP_NAME, logging_config=logs)


def http_options(config: ServerConfig) -> dict[str, Any]:
    """Options of Ray Serve's proxies, by its names: the limits that they take.

    Their time for a request is longer than ours, which ends a stream with an error and not within
    an event.
    """
    # It imports uvicorn, which commands without Ray Serve need not wait for.
    from ..api.http.connections import KEEP_ALIVE_TIMEOUT_S  # noqa: PLC0415

    options = {
        "host": config.host,
        "port": config.port,
        "keep_alive_timeout_s": math.ceil(KEEP_ALIVE_TIMEOUT_S),
    }
    if config.request_timeout_s is None:
        return options
    return options | {"request_timeout_s": config.request_timeout_s + PROXY_SLACK_S}


def serve_host() -> str | None:
    """The address that the running Ray Serve's proxies listen on; None: there is none."""
    import ray  # noqa: PLC0415
    from ray.serve.context import _get_global_client  # noqa: PLC0415 - there is no public way

    if not ray.is_initialized():
        return None
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config.host


def _drain(timeout_s: float) -> None:
    """Let the running requests end; an interrupt ends the waiting."""
    from ray import serve  # noqa: PLC0415
    from ray.exceptions import RayError  # noqa: PLC0415
    from ray.serve.exceptions import RayServeException  # noqa: PLC0415

    try:
        draining = serve.get_app_handle(APP_NAME).broadcast("drain", timeout_s)
        draining.results(timeout_s=timeout_s + DRAIN_SLACK_S, return_exceptions=True)
    except KeyboardInterrupt:
        logger.info("event=drain_interrupted")
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("event=drain_failed reason=%r", reason_of(error))


def _delete(name: str) -> None:
    """End an application; one that Ray Serve does not end within its own time is left to it."""
    from ray import serve  # noqa: PLC0415
    from ray.exceptions import RayError  # noqa: PLC0415

    try:
        serve.delete(name)
    except (RayError, TimeoutError) as error:
        logger.warning("event=delete_failed application=%s reason=%r", name, reason_of(error))


def _start_ray(args: ServeArgs, address: str | None, *, with_logs: bool) -> None:
    import ray  # noqa: PLC0415

    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {
            "address": "local",
            "num_cpus": _num_cpus(args),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(log_to_driver=with_logs, logging_level=logging.ERROR, **options)
            break
        except Exception as error:  # Ray itself raises no narrower class
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                raise DraftlineError(f"Ray did not start: {reason_of(error)}") from error
            logger.warning("event=ray_start_failed reason=%r", reason_of(error))
    _interrupt_on_sigterm()


def _num_cpus(args: ServeArgs) -> int:
    """Logical CPUs for all parts: on a small machine they take turns, slowly, but it works."""
    bundles = placement_bundles(args.engine, args.deployment)
    needed = sum(bundle["CPU"] for bundle in bundles) * args.deployment.num_replicas
    needed += args.deployment.ingress_cpus * args.deployment.num_ingress_replicas
    needed += sum(pool.cpus_per_drafter * pool.max_replicas for pool in args.pools.values())
    return max(os.cpu_count() or 1, math.ceil(needed))


def reason_of(error: BaseException) -> str:
    """The line of a nested message that names the cause: the last one that is not blank."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _interrupt_on_sigterm() -> None:
    """Make SIGTERM end the process as SIGINT does; Ray has put a handler of its own in place."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)
