"""`draftline doctor --cluster`: whether nodes reach one another, their GPUs, and the time of a hop.

An actor on every node of a Ray cluster reads its GPUs. Then each pair of nodes sends hidden states
both ways, as neighbouring stages do with `stage_transport: distributed`.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, pairwise
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayError
from rich.console import Console
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...cluster.pipeline.bundle import at_node
from ...cluster.transport.hidden_link import open_group, serve_store
from ...core.errors import ConfigError
from ..ray_serve.runtime import quiet_libraries, reason_of
from .doctor import Finding, print_findings

T = TypeVar("T")
ANSWER_TIMEOUT_S, MEETING = 120.0, timedelta(seconds=20)
# Of a 70B, 16 KiB a token; one token and a prompt chunk, and how often each is sent.
HIDDEN_SIZE, TOKEN, CHUNK = 8192, (1, 100), (512, 8)
# Across zones of a cloud; 8 Gbit/s.
SLOW_TOKEN_S, SLOW_CHUNK_S = 1e-3, 9e-3
# Of a larger cluster not all pairs are timed, but those of the head and those along the list.
MOST_FULLY = 6
USED_SHARE = 0.1
GIB = 2.0**30
SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One, by its driver; memory and used bytes."""

    name: str
    memory: float
    used: float


class NodeProbe:
    """The actor on the node of this address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: TCPStore | None = None

    def look(self) -> tuple[str, tuple[Gpu, ...]]:
        """The host's name, and its GPUs."""
        return socket.gethostname(), read_gpus()

    def serve_store(self) -> int:
        """The port at which the other node of a pair finds this one, for the next `time_hop`."""
        self._store, port = serve_store(self._address, MEETING)
        return port

    def time_hop(self, place: int, host: str, port: int) -> tuple[float, float]:
        """Seconds of a hop of a token, and of a chunk, to or from the other node of a pair.

        place       in the pair: 0 has the store
        host, port  of the store
        """
        store, self._store = self._store, None
        if place == 1:
            store = TCPStore(host, port, is_master=False, timeout=MEETING)
        assert store is not None, "place 0 has served the store"
        group = open_group("gloo", store, place, 2, self._address, timeout=MEETING)
        return _hop_s(group, place, *TOKEN), _hop_s(group, place, *CHUNK)


def _hop_s(group: Any, place: int, num_rows: int, rounds: int) -> float:
    """Half of the fastest round trip: what the nodes do beside counts for nothing."""
    rows, other = [torch.zeros(num_rows, HIDDEN_SIZE, dtype=torch.bfloat16)], 1 - place
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for pass_on in (group.send, group.recv) if place == 0 else (group.recv, group.send):
            pass_on(rows, other, 0).wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / 2


def read_gpus() -> tuple[Gpu, ...]:
    """What `nvidia-smi` says; none where it is missing or fails."""
    try:
        output = subprocess.run(SMI, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = [[part.strip() for part in line.rsplit(",", 2)] for line in output.splitlines()]
    # A GPU that is divided into instances has no number here.
    return tuple(
        Gpu(name, int(total) * 2.0**20, int(used) * 2.0**20)
        for name, total, used in lines
        if total.isdigit() and used.isdigit()
    )


def run_cluster_doctor(console: Console) -> int:
    """Print all findings; 1 if a node or a way between two is missing. Raises `ConfigError`."""
    quiet_libraries()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            "cluster",
            f"no Ray cluster here ({reason_of(error)}); run this on one of its nodes, with its "
            "token (RAY_AUTH_MODE=token), or start one by `ray start --head`",
        ) from error
    try:
        return print_findings(console, [*cluster_findings()])
    finally:
        ray.shutdown()


def cluster_findings() -> Iterator[Finding]:
    """Of all nodes of the cluster, the head first, then of the hops between those that answer."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: "node:__internal_head__" not in node["Resources"])
    actor: Any = ray.remote(NodeProbe)
    probes: list[Any] = [
        actor.options(num_cpus=0, scheduling_strategy=at_node(node["NodeID"])).remote(
            node["NodeManagerAddress"]
        )
        for node in alive
    ]
    answering = []
    looks = [probe.look.remote() for probe in probes]
    for node, probe, look in zip(alive, probes, looks, strict=True):
        address = node["NodeManagerAddress"]
        try:
            host, gpus = ray.get(look, timeout=ANSWER_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            yield Finding(f"node {address}", f"does not answer: {reason_of(error)}", ok=False)
            continue
        answering.append((address, probe))
        yield node_finding(address, host, gpus, int(node["Resources"].get("GPU", 0)))
    for first, second in pairs_of(answering):
        yield _hop_finding(first, second)


def node_finding(address: str, host: str, gpus: Sequence[Gpu], num_given: int) -> Finding:
    """GPUs of a node that answers, and how many of them Ray manages."""
    text = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in gpus) or "no GPU"
    used = sum(gpu.used for gpu in gpus if gpu.used > USED_SHARE * gpu.memory)
    if num_given < len(gpus):
        text += f"; Ray may give {num_given} of {len(gpus)}: ray start --num-gpus {len(gpus)}"
    elif used:
        text += (
            f"; {used / GIB:.0f} GiB in use: end what uses them, or set gpu_memory_utilization "
            "lower"
        )
    is_fine = num_given >= len(gpus) and not used
    return Finding(f"node {address}", f"{host}, {text}", is_fine, needed=False)


def pairs_of(nodes: Sequence[T]) -> list[tuple[T, T]]:
    """Between which nodes a hop is timed."""
    if len(nodes) <= MOST_FULLY:
        return [*combinations(nodes, 2)]
    return [*((nodes[0], node) for node in nodes[1:]), *pairwise(nodes[1:])]


def _hop_finding(*ends: tuple[str, Any]) -> Finding:
    """Of two nodes, each with its address and its probe."""
    (host, first), (address, second) = ends
    subject = f"hop {host} - {address}"
    try:
        port = ray.get(first.serve_store.remote(), timeout=ANSWER_TIMEOUT_S)
        asked = [
            probe.time_hop.remote(place, host, port) for place, probe in enumerate((first, second))
        ]
        # The second connects first, so it knows what is wrong.
        _, (token_s, chunk_s) = ray.get(asked[::-1], timeout=ANSWER_TIMEOUT_S)
    except (RayError, TimeoutError) as error:
        advice = "open all ports between the nodes (a security group, a network policy)"
        return Finding(subject, f"{reason_of(error)}: {advice}", ok=False)
    text = f"{1e3 * token_s:.2f} ms a token, {1e3 * chunk_s:.1f} ms a chunk of {CHUNK[0]} tokens"
    if token_s > SLOW_TOKEN_S:
        text += ": far apart; take nodes of one zone, or placement_group_strategy: STRICT_PACK"
    elif chunk_s > SLOW_CHUNK_S:
        text += ": prompts wait for it; take nodes with a faster network, or fewer stages"
    is_fast = token_s <= SLOW_TOKEN_S and chunk_s <= SLOW_CHUNK_S
    return Finding(subject, text, is_fast, needed=False)
