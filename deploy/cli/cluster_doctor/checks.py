"""What is wrong with a cluster, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from ....measure.simulate.devices import GIB
from ..doctor import Finding
from .node_facts import NodeFacts
from .probe import ClusterFacts, LinkFacts

# Nodes must agree on these; the others may compute other bits, or know other models.
NEEDED = ("python", "draftline", "ray", "protobuf", "msgspec")
# Beside a copy of the model: compiled code, logs, Ray's spilled objects.
DISK_BYTES = 10 * GIB
SLOW_LINK_S, THIN_LINK = 1e-3, 1e9
USED_SHARE = 0.1
SLOW_REDIS_S = 5e-3


def checks(facts: ClusterFacts, model: str) -> Iterator[Finding]:
    """All findings but predictions, nodes first."""
    for node in facts.nodes:
        yield _node(node)
    for address, reason in facts.silent.items():
        yield Finding(f"node {address}", f"does not answer: {reason}", ok=False)
    yield from _versions(facts)
    yield from _gpus(facts)
    for link in facts.links:
        yield _link(facts, link)
    for node in facts.nodes:
        yield from _files(node, model)
        yield from _redis(node)


def _node(node: NodeFacts) -> Finding:
    gpus = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in node.gpus) or "no GPU"
    cpus, given = node.resources.get("CPU", 0), node.resources.get("GPU", 0)
    return Finding(
        f"node {node.address}",
        f"{node.host}, {node.cpus} CPUs, {node.memory / GIB:.0f} GiB free, {gpus}; "
        f"Ray may give {cpus:g} CPUs and {given:g} GPUs",
        ok=given > 0 or not node.gpus,
        needed=False,
    )


def _versions(facts: ClusterFacts) -> Iterator[Finding]:
    names = list(facts.nodes[0].versions) if facts.nodes else []
    for name in names:
        found = {node.address: node.versions[name] for node in facts.nodes}
        kinds = sorted(set(found.values()))
        if len(kinds) == 1:
            yield Finding(name, f"{kinds[0]} on all nodes", kinds[0] != "none", name in NEEDED)
            continue
        first = facts.nodes[0]
        others = [address for address, kind in found.items() if kind != found[first.address]]
        yield Finding(
            name,
            f"{', '.join(kinds)}: install {name} {found[first.address]} on {', '.join(others)}, or "
            "take one image for all",
            ok=False,
            needed=name in NEEDED,
        )


def _gpus(facts: ClusterFacts) -> Iterator[Finding]:
    names = sorted({gpu.name for node in facts.nodes for gpu in node.gpus})
    if len(names) > 1:
        text = f"{', '.join(names)}: stages are as slow as the slowest; keep one kind for stages"
        yield Finding("kinds of GPUs", text, ok=False, needed=False)
    for node in facts.nodes:
        for gpu in node.gpus:
            if gpu.used > USED_SHARE * gpu.memory:
                yield Finding(
                    f"memory of {node.address}",
                    f"{gpu.used / GIB:.0f} GiB of {gpu.name} are in use: end what uses them, or "
                    "set gpu_memory_utilization lower",
                    ok=False,
                    needed=False,
                )


def _link(facts: ClusterFacts, link: LinkFacts) -> Finding:
    ends = f"{facts.nodes[link.first].address} - {facts.nodes[link.second].address}"
    subject = f"link {ends}"
    measured = link.measured
    if measured is None:
        advice = "open all ports between the nodes (a security group, a network policy)"
        return Finding(subject, f"{link.problem}: {advice}", ok=False)
    text = f"{1e6 * measured.latency_s:.0f} us, {8e-9 * measured.bandwidth:.1f} Gbit/s"
    if measured.latency_s > SLOW_LINK_S:
        text += ": far apart; take nodes of one zone, or placement_group_strategy: STRICT_PACK"
    elif measured.bandwidth < THIN_LINK:
        text += ": prompts wait for it; take nodes with a faster network, or fewer stages"
    is_good = measured.latency_s <= SLOW_LINK_S and measured.bandwidth >= THIN_LINK
    return Finding(subject, text, is_good, needed=False)


def _files(node: NodeFacts, model: str) -> Iterator[Finding]:
    subject = f"{model} on {node.address}"
    if node.model_bytes is None:
        yield Finding(
            subject, f"{node.problem}; copy it there, or mount one folder on all nodes", ok=False
        )
        return
    has_room = node.disk_free >= DISK_BYTES
    text = (
        f"{node.model_bytes / GIB:.2f} GiB of weights, {node.disk_free / GIB:.0f} GiB of disk free"
    )
    if not has_room:
        text += f": less than {DISK_BYTES / GIB:.0f} GiB, which logs and compiled code may fill"
    yield Finding(subject, text, has_room, needed=False)


def _redis(node: NodeFacts) -> Iterator[Finding]:
    subject = f"Redis from {node.address}"
    if node.redis:
        yield Finding(subject, f"{node.redis}: check the URL, its password and the way", ok=False)
    elif node.redis_s is not None:
        is_near = node.redis_s <= SLOW_REDIS_S
        far = "" if is_near else ": far away; lookups go on from memory, news come late"
        yield Finding(
            subject, f"answers in {1e3 * node.redis_s:.2f} ms{far}", is_near, needed=False
        )
