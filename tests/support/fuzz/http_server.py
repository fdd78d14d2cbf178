"""The server that is fuzzed, in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from support.fuzz.http_values import MARKER

PERIOD_S = 0.02
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Poll:
    """How long an answer took, when it was asked for (`time.monotonic`), and how long the server's
    threads computed meanwhile, all together."""

    seconds: float
    begun: float
    cpu_s: float


class HealthWatch:
    """Asks for `/health` again and again, in a thread of its own, over one connection.

    polls   every answer
    faults  answers that were not 200
    """

    def __init__(self, server: FuzzedServer) -> None:
        address = urlsplit(server.url)
        self._pid = server.pid
        self._host, self._port = address.hostname or "", address.port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.polls: list[Poll] = []
        self.faults: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def slowest(self) -> Poll:
        """The slowest answer."""
        return max(self.polls, key=lambda poll: poll.seconds, default=Poll(0.0, 0.0, 0.0))

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        while not self._stop.wait(PERIOD_S):
            begun, cpu_s = time.monotonic(), cpu_seconds(self._pid)
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                # A full server may close an idle connection just when a request comes.
                is_late = time.monotonic() - begun >= TIMEOUT_S
                if is_late or not isinstance(error, ConnectionError):
                    self.faults.append(f"/health: {type(error).__name__}")
                connection.close()
                continue
            seconds = time.monotonic() - begun
            self.polls.append(Poll(seconds, begun, cpu_seconds(self._pid) - cpu_s))
            if answer.status != http.client.OK and b"all of them busy" not in body:
                self.faults.append(f"/health: {answer.status}")
        connection.close()


COMMAND = (sys.executable, "-c", "from draftline.deploy.cli.main import main; main()")
# Little of everything, so that limits are met; and drafts in every step, whether they pay or not.
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "node_budget": "full",
    "tree_nodes": 8,
    "drafters": [{"kind": "prompt_lookup"}, {"kind": "suffix"}, {"kind": "spectra"}],
    "max_model_len": 256,
    "max_num_seqs": 12,
    "max_queued_requests": 24,
    "kv_cache_tokens": 2048,
    "server": {
        "max_connections": 48,
        "drain_timeout_s": 2.0,
    },
}
START_TIMEOUT_S = 180.0
POLL_S = 0.1
# What callers must not see in the log either.
KEY_HEADER = {"authorization": f"Bearer {MARKER}"}


@dataclass(frozen=True, slots=True)
class FuzzedServer:
    """A server's address, without `/v1`; its process; and the file that it prints to."""

    url: str
    pid: int
    log: Path


@dataclass(frozen=True, slots=True)
class ServerHoldings:
    """What a server holds, of the system and of its own; and drafted tokens accepted so far."""

    fds: int
    threads: int
    processes: int
    running: int
    waiting: int
    kv_usage: float
    accepted_tokens: float


@contextmanager
def served(folder: Path) -> Iterator[FuzzedServer]:
    """A server of the demo model; ended at the end."""
    config, log = folder / "fuzz.settings.json", folder / "fuzz.log"
    config.write_text(json.dumps(SETTINGS))
    command = [*COMMAND, "serve", "--config", str(config), "--port", "0"]
    env = os.environ | {"PYTHONUNBUFFERED": "1", "DRAFTLINE_API_KEY": MARKER}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env) as process,
    ):
        try:
            yield FuzzedServer(_address(process, log), process.pid, log)
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"ready: (http://\S+)/v1", log.read_text()):
            return found[1]
        time.sleep(POLL_S)
    raise RuntimeError(f"the server did not start: {log.read_text()}")


def holdings(server: FuzzedServer) -> ServerHoldings:
    """What the server holds now: the engine's process and those of the API together."""
    processes = _processes(server.pid)
    headers = {"connection": "close", **KEY_HEADER}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        load = client.get("/load").raise_for_status().json()
        metrics = client.get("/metrics").raise_for_status().text
    return ServerHoldings(
        fds=sum(len(list((process / "fd").iterdir())) for process in processes),
        threads=sum(map(_num_threads, processes)),
        processes=len(_children(processes[0])),
        running=load["num_running"],
        waiting=load["num_waiting"],
        kv_usage=_metric(metrics, "vllm:kv_cache_usage_perc"),
        accepted_tokens=_metric(metrics, "vllm:spec_decode_num_accepted_tokens_total"),
    )


def cpu_seconds(pid: int) -> float:
    """For how long a server has computed, in all threads of its processes together."""
    ticks = 0
    for process in _processes(pid):
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes(pid: int) -> list[Path]:
    """The server's first process, and those of its API."""
    first = Path("/proc") / str(pid)
    return [first, *(child for child in _children(first) if _is_api(child))]


def _children(process: Path) -> list[Path]:
    lists = [file.read_text().split() for file in (process / "task").glob("*/children")]
    return [process.parent / child for one in lists for child in one]


def _is_api(process: Path) -> bool:
    return b"draftline.deploy.cli.serve.api_process" in (process / "cmdline").read_bytes()


def _num_threads(process: Path) -> int:
    found = re.search(r"^Threads:\s+(\d+)$", (process / "status").read_text(), re.M)
    assert found is not None
    return int(found[1])


def _metric(text: str, name: str) -> float:
    """The sum of a metric's samples; 0.0 where it has none."""
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)
    return sum(map(float, found))
