"""An actor on every node of a Ray cluster, which tells of its node and of the ways to others."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import ray
from ray.exceptions import RayError

from ....cluster.pipeline.bundle import at_node
from ....core.errors import ConfigError
from .link_meter import LinkServer, Measured, measure_link
from .node_facts import NodeFacts, read_node

START_TIMEOUT_S, CONNECT_TIMEOUT_S = 120.0, 5.0
# Each pair takes a moment; of a large cluster those from the head and along a ring are measured.
MOST_FULLY = 6


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Between the nodes of these places in the list; `problem` where it could not be measured."""

    first: int
    second: int
    measured: Measured | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All nodes that answer, the head first, and the links that were measured.

    silent  why others do not, by address
    """

    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)


class NodeProbe:
    """What runs on a node."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._server: LinkServer | None = None

    def facts(self, model: str, folder: str, redis_url: str | None) -> NodeFacts:
        """See `read_node`."""
        return read_node(self._address, model, folder, redis_url)

    def listen(self) -> tuple[int, bytes]:
        """The port and token of a server for one measurement."""
        self._server = LinkServer(self._address)
        return self._server.port, self._server.token

    def measure(self, host: str, port: int, token: bytes) -> Measured:
        """See `measure_link`."""
        return measure_link(host, port, token)


def pairs_of(count: int) -> Sequence[tuple[int, int]]:
    """Which nodes' links are measured."""
    if count <= MOST_FULLY:
        return [*combinations(range(count), 2)]
    ring = {(place, place + 1) for place in range(count - 1)}
    return sorted(ring | {(0, place) for place in range(1, count)})


def read_cluster(address: str, model: str, folder: str, redis_url: str | None) -> ClusterFacts:
    """Ask all nodes. Raises `ConfigError` where there is no cluster."""
    with _joined(address):
        nodes = sorted(_alive(), key=lambda node: not _is_head(node))
        actor: Any = ray.remote(NodeProbe)
        probes = [
            actor.options(num_cpus=0, scheduling_strategy=at_node(node["NodeID"])).remote(
                node["NodeManagerAddress"]
            )
            for node in nodes
        ]
        asked = [probe.facts.remote(model, folder, redis_url) for probe in probes]
        answers, silent, answering = [], {}, []
        for node, probe, answer in zip(nodes, probes, asked, strict=True):
            try:
                told: Any = ray.get(answer, timeout=START_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                silent[node["NodeManagerAddress"]] = _reason(error)
                continue
            answers.append(replace(told, resources=_resources(node)))
            answering.append(probe)
        links = [_link(answering, answers, *pair) for pair in pairs_of(len(answers))]
        return ClusterFacts(tuple(answers), tuple(links), silent)


def _link(probes: Sequence[Any], facts: Sequence[NodeFacts], first: int, second: int) -> LinkFacts:
    try:
        port, token = ray.get(probes[second].listen.remote(), timeout=START_TIMEOUT_S)
        asked = probes[first].measure.remote(facts[second].address, port, token)
        return LinkFacts(first, second, ray.get(asked, timeout=START_TIMEOUT_S))
    except (RayError, TimeoutError) as error:
        return LinkFacts(first, second, None, _reason(error))


def _reason(error: BaseException) -> str:
    """One line: what Ray wraps is told in many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _alive() -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _is_head(node: Mapping[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]


def _resources(node: Mapping[str, Any]) -> dict[str, float]:
    return {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}


@contextmanager
def _joined(address: str) -> Iterator[None]:
    """This process as a driver of the cluster; one that is a driver already stays it."""
    if ray.is_initialized():
        yield
        return
    _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise _no_cluster(address, type(error).__name__) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise `ConfigError` where nobody listens: Ray would try for a quarter of an hour."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, reason: str) -> ConfigError:
    return ConfigError(
        "address",
        f"no Ray cluster at {address!r} ({reason}); start one by `ray start --head`, or give the "
        "host:port of its head, and have its token (RAY_AUTH_MODE=token)",
    )
