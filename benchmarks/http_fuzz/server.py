"""The server that is fuzzed, in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .values import MARKER

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
        "header_timeout_s": 2.0,
        "body_timeout_s": 3.0,
        "drain_timeout_s": 2.0,
    },
}
START_TIMEOUT_S = 180.0
POLL_S = 0.1
# What callers must not see in the log either.
KEY_HEADER = {"authorization": f"Bearer {MARKER}"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address, without `/v1`; its process; and the file that it prints to."""

    url: str
    pid: int
    log: Path


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a server holds, of the system and of its own; and drafted tokens accepted so far."""

    fds: int
    threads: int
    processes: int
    running: int
    waiting: int
    kv_usage: float
    accepted_tokens: float


@contextmanager
def served(folder: Path) -> Iterator[Server]:
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
            yield Server(_address(process, log), process.pid, log)
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


def holdings(server: Server) -> Holdings:
    """What the server holds now: the engine's process and those of the API together."""
    processes = _processes(server.pid)
    headers = {"connection": "close", **KEY_HEADER}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        load = client.get("/load").raise_for_status().json()
        metrics = client.get("/metrics").raise_for_status().text
    return Holdings(
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
