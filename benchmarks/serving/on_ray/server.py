"""`draftline serve` with the settings of a benchmark, started as a user does and ended whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .processes import Process, still_there, tree

COMMAND = (sys.executable, "-c", "from draftline.deploy.cli.main import main; main()")
STOP_TIMEOUT_S = 60.0
# Ray's own processes notice within this time that their driver is gone.
END_TIMEOUT_S = 20.0
# And one that is aborted has written where its threads are.
ABORT_TIMEOUT_S = 5.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address, without `/v1`, and its first process.

    left  once it was told to stop, and its first process has ended: those that had not
    """

    url: str
    pid: int
    left: list[Process] = field(default_factory=list)


@contextmanager
def served(
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    ray_address: str | None = None,
) -> Iterator[Server]:
    """A server with these settings at a free port; nothing of it is left at the end.

    ray_address  of a cluster that runs; None: the server starts one, which ends with it
    """
    with TemporaryDirectory() as folder:
        config = Path(folder) / "settings.json"
        config.write_text(json.dumps(settings))
        command = [*COMMAND, "serve", "--config", str(config), "--port", "0"]
        command += [] if ray_address is None else ["--ray-address", ray_address]
        # One that does not end says where it is (`_stop`).
        env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        env |= dict(environment or {})
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            server = None
            try:
                server = Server(_address(process), process.pid)
                yield server
            finally:
                left = _stop(process)
                if server is not None:
                    server.left.extend(left)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"ready: (http://\S+)/v1", line):
            return found[1]
    raise RuntimeError("the server did not start")


def _stop(process: subprocess.Popen[str]) -> list[Process]:
    """Interrupt the server as a user does; what did not end of it, which is killed then."""
    processes = tree(process.pid)
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := still_there(processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for one in left:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGABRT if one.pid == process.pid else signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ABORT_TIMEOUT_S)
    process.kill()
    return left
