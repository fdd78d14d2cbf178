"""The servers that can run here, by name, and which of them are compared."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError
from .report import OUR_DEFAULT, OUR_PLAIN, VLLM_PLAIN
from .rounds import TRANSFORMERS
from .servers import (
    DRAFTERS,
    LLAMA_SPECULATION,
    VLLM_SPECULATION,
    LlamaBinary,
    PeerEnvironment,
    ServerSpec,
    draftline_server,
    llama_server,
    vllm_server,
)

COMPARED = (
    VLLM_PLAIN, "vLLM, suffix", "vLLM, ngram", "llama.cpp, plain", "llama.cpp, ngram",
    OUR_PLAIN, OUR_DEFAULT, TRANSFORMERS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peers:
    """What was found here. `models` is the folder of llama.cpp's model files."""

    vllm: PeerEnvironment
    llama: LlamaBinary | None
    models: Path
    threads: int
    eager: bool = False


def known_servers(peers: Peers) -> dict[str, ServerSpec]:
    """Every server that can run, by its name, draftline last."""
    specs: list[ServerSpec] = []
    if peers.vllm.version() is not None:
        specs += [
            vllm_server(name, peers.vllm, peers.threads, eager=peers.eager)
            for name in VLLM_SPECULATION
        ]
    if peers.llama is not None and peers.llama.version() is not None:
        specs += [
            llama_server(name, peers.llama.path, peers.models, peers.threads)
            for name in LLAMA_SPECULATION
        ]
    ours: dict[str, Sequence[str] | None] = {
        "plain": (), "default": None, "prompt_lookup": ("prompt_lookup",), "all": tuple(DRAFTERS)
    }  # fmt: skip
    specs += [draftline_server(name, drafters, peers.threads) for name, drafters in ours.items()]
    return {spec.name: spec for spec in specs}


def chosen(known: Sequence[str], parts: Sequence[str]) -> list[str]:
    """The names that hold one of `parts`; without any, those of `COMPARED`, in its order.

    Raises `ConfigError` for a part that no name holds.
    """
    if not parts:
        return [name for name in COMPARED if name in known]
    for part in parts:
        if not any(part in name for name in known):
            raise ConfigError("servers", f"{part!r} is in no name: {'; '.join(known)}")
    return [
        name
        for name in known
        # A whole name means that one, and not those that go on behind it.
        if any(part == name or (part in name and part not in known) for part in parts)
    ]


def shown(spec: ServerSpec, peers: Peers, root: Path) -> str:
    """The command without the folders of this machine."""
    command = shlex.join([*spec.command, "0"])
    places = {
        str(peers.vllm.python): "python",
        str(peers.models): "MODELS",
        sys.executable: "python",
    }
    if peers.llama is not None:
        places[str(peers.llama.path)] = "llama-server"
    for place, name in places.items():
        command = command.replace(place, name)
    return command.replace(str(root), ".")
