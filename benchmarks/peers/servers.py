"""The commands of servers of the same model: draftline, vLLM, llama.cpp."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models.load.bundled import demo_path
from .environment import PeerEnvironment

MAX_MODEL_LEN = 1024
MAX_SEQS = 64
TARGET, DRAFTER = "demo", "demo-drafter"
# The space of vLLM's keys and values. In float32 a token of the demo takes 6 KiB (6 layers of 2
# heads of 64), so this holds every request at its longest.
KV_GIB = 1

DEFAULT = "default"
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
LLAMA_SPECULATION: dict[str, tuple[str, ...]] = {
    "plain": (),
    # Of its n-gram kinds this takes the least processor time a token on the demo; the sizes that it
    # has by itself, 12 and 48, are for rewriting long texts.
    "ngram": (
        "--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "4",
        "--spec-ngram-map-k-size-m", "12",
    ),
    "draft_model": ("--spec-type", "draft-simple", "--spec-draft-n-max", "4"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A command that serves the target at the port that is put behind it."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Who wrote it."""
        return self.name.partition(",")[0]


def draftline_server(name: str, drafters: Sequence[str] | None, threads: int) -> ServerSpec:
    """draftline with these drafters.

    None: those of `draftline serve` when it is told nothing, on one stage, since each stage has a
    thread of its own.
    """
    own = [] if drafters is None else [TARGET]
    command = [
        sys.executable, "-c", "from draftline.deploy.cli.main import main; main()", "serve", *own,
        "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_SEQS), "--kv-cache-tokens", str(MAX_SEQS * MAX_MODEL_LEN),
    ]  # fmt: skip
    if drafters is None:
        command += ["--pipeline-parallel-size", "1"]
    else:
        config = json.dumps([DRAFTERS[drafter] for drafter in drafters])
        command += ["--speculative-config", config]
    return ServerSpec(f"draftline, {name}", (*command, "--port"), _threads(threads))


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
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, first_cores(threads))),
        "LD_PRELOAD": ":".join(map(str, peer.preload)),
    }
    return ServerSpec(f"vLLM, {name}", (*command, "--port"), environment)


def llama_server(name: str, binary: Path, models: Path, threads: int) -> ServerSpec:
    """llama.cpp's server with one of `LLAMA_SPECULATION`; GGUF files are in `models`.

    A slot for every request, each with room for the longest one; keys and values in float32.
    """
    count = str(threads)
    command = [
        str(binary), "--model", str(models / f"{TARGET}.gguf"), "--alias", TARGET,
        "--ctx-size", str(MAX_SEQS * MAX_MODEL_LEN), "--parallel", str(MAX_SEQS),
        "--threads", count, "--threads-batch", count,
        "--cache-type-k", "f32", "--cache-type-v", "f32",
        "--no-cache-prompt", "--cache-ram", "0", "--no-webui", "--host", "127.0.0.1",
        *LLAMA_SPECULATION[name],
    ]  # fmt: skip
    if name == "draft_model":
        command += [
            "--model-draft", str(models / f"{DRAFTER}.gguf"), "--threads-draft", count,
            "--threads-batch-draft", count, "--spec-draft-type-k", "f32",
            "--spec-draft-type-v", "f32",
        ]  # fmt: skip
    return ServerSpec(f"llama.cpp, {name}", (*command, "--port"), _threads(threads))


def first_cores(count: int) -> list[int]:
    """So many of the cores that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)
    return sorted(allowed)[:count]


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))
