"""Servers of the same model, each in a process of its own, one at a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ...core.errors import DraftlineError
from ...models.load.bundled import demo_path
from .environment import PeerEnvironment

# vLLM imports, loads and compiles; the first compilation is the longest.
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
MAX_MODEL_LEN = 1024
MAX_SEQS = 32
TARGET, DRAFTER = "demo", "demo-drafter"

# In order of priority.
DRAFTERS: dict[str, dict[str, Any]] = {
    "suffix": {"kind": "suffix"},
    "prompt_lookup": {"kind": "prompt_lookup"},
    "spectra": {"kind": "spectra"},
    "retrieval": {"kind": "retrieval", "store": "demo"},
    "model": {"kind": "model", "model": DRAFTER},
}
VLLM_SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    },
    "draft_model": {
        "method": "draft_model",
        "model": str(demo_path(DRAFTER)),
        "num_speculative_tokens": 4,
    },
    "suffix": {"method": "suffix"},
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A command that serves the target at the port that is put behind it."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def draftline_server(
    name: str, drafters: Sequence[str], threads: int, *, compiled: bool = False
) -> ServerSpec:
    """draftline with these drafters; `compiled` turns compiled stages on."""
    config = json.dumps([DRAFTERS[drafter] for drafter in drafters])
    command = (
        sys.executable, "-c", "from draftline.deploy.cli.main import main; main()", "serve", TARGET,
        "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_SEQS), "--speculative-config", config,
        "--compile", "on" if compiled else "auto", "--port",
    )  # fmt: skip
    return ServerSpec(f"draftline, {name}", command, _threads(threads))


def vllm_server(
    name: str, peer: PeerEnvironment, threads: int, *, eager: bool = False
) -> ServerSpec:
    """vLLM with one of `VLLM_SPECULATION`; without `eager` it compiles, as is its default."""
    # By module: the `vllm` command looks for the metadata of a distribution named vllm.
    command = [
        str(peer.python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(demo_path(TARGET)), "--served-model-name", TARGET, "--dtype", "float32",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS),
        "--no-enable-prefix-caching", "--host", "127.0.0.1",
    ]  # fmt: skip
    speculation = VLLM_SPECULATION[name]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    if eager:
        command.append("--enforce-eager")
    environment = _threads(threads) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "LD_PRELOAD": ":".join(map(str, peer.preload)),
    }
    return ServerSpec(f"vLLM, {name}", (*command, "--port"), environment)


@contextmanager
def running(spec: ServerSpec, logs: Path) -> Iterator[str]:
    """The URL of the server once it is healthy; it is ended afterwards.

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
            yield url
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


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))
