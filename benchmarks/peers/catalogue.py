"""The servers that can run here, by name, and which of them are compared."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError
from .report import NARROW, OUR_DEFAULT, OUR_PLAIN, VLLM_PLAIN
from .rounds import TRANSFORMERS
from .servers import (
    BUNDLED_ONLY,
    DRAFT_MODEL,
    DRAFTERS,
    HEAD,
    LLAMA_SPECULATION,
    PLAIN,
    VLLM_SPECULATION,
    WIDE,
    LlamaBinary,
    PeerEnvironment,
    ServerSpec,
    draftline_server,
    llama_server,
    vllm_server,
)
from .target import Target

COMPARED = (
    VLLM_PLAIN, "vLLM, suffix", "vLLM, ngram", "vLLM, eagle3", "llama.cpp, plain",
    "llama.cpp, ngram", "llama.cpp, Q8_0 plain", "llama.cpp, Q4_1 plain", OUR_PLAIN, OUR_DEFAULT,
    "draftline, eagle3", TRANSFORMERS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peers:
    """What was found here.

    models  folder of llama.cpp's model files
    head    folder of an EAGLE-3 head of the target
    """

    target: Target
    vllm: PeerEnvironment
    llama: LlamaBinary | None
    models: Path
    threads: int
    eager: bool = False
    head: Path | None = None


def known_servers(peers: Peers) -> dict[str, ServerSpec]:
    """Every server that can run, by its name, draftline last."""
    specs: list[ServerSpec] = []
    target, threads = peers.target, peers.threads
    if peers.vllm.version() is not None:
        specs += [
            vllm_server(target, name, peers.vllm, threads, eager=peers.eager, head=peers.head)
            for name in _possible(VLLM_SPECULATION, peers)
        ]
    if peers.llama is not None and peers.llama.version() is not None:
        names = [(WIDE, name) for name in _possible(LLAMA_SPECULATION, peers)]
        # Its users have narrow weights of chat models; the bundled one is of the size of a cache.
        names += [(weights, PLAIN) for weights in NARROW] if target.is_chat else []
        specs += [
            llama_server(target, name, peers.llama.path, peers.models, threads, weights)
            for weights, name in names
        ]
    possible = [one for one in DRAFTERS if target.is_bundled or one not in BUNDLED_ONLY]
    ours: dict[str, Sequence[str] | None] = {PLAIN: (), "default": None}
    ours |= {drafter: (drafter,) for drafter in possible} | {"all": possible}
    ours |= {HEAD: (HEAD,)} if peers.head is not None else {}
    specs += [
        draftline_server(target, name, drafters, threads, peers.head)
        for name, drafters in ours.items()
    ]
    return {spec.name: spec for spec in specs}


def _possible(speculation: Iterable[str], peers: Peers) -> list[str]:
    needed = {DRAFT_MODEL: peers.target.assistant, HEAD: peers.head}
    return [name for name in speculation if name not in needed or needed[name] is not None]


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
        str(peers.target.folder): peers.target.name,
        sys.executable: "python",
    }
    if peers.head is not None:
        places[str(peers.head)] = "HEAD"
    if peers.llama is not None:
        places[str(peers.llama.path)] = "llama-server"
    for place, name in places.items():
        command = command.replace(place, name)
    return command.replace(str(root), ".")
