"""A server in a process of its own, for as long as it is measured."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ...core.errors import DraftlineError
from .servers import ServerSpec

# vLLM imports, loads and compiles; the first compilation is the longest.
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Its URL, and the process that leads its session."""

    url: str
    pid: int


@contextmanager
def running(spec: ServerSpec, logs: Path) -> Iterator[RunningServer]:
    """The server once it is healthy; it is ended afterwards.

    Its output goes to a file in `logs`. Raises `DraftlineError` if it does not come up.
    """
    port = _free_port()
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{spec.name}.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*spec.command, str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | spec.environment,
            # Its own group: what it starts ends with it.
            start_new_session=True,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(spec, process, url, log)
            yield RunningServer(url, process.pid)
        finally:
            _end(process)


def _wait(spec: ServerSpec, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise DraftlineError(f"{spec.name} did not come up; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
