"""What a cluster is good for: its slowest device, its slowest link, and what follows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....core.errors import ConfigError
from ....measure.simulate.cost_profile import Device
from ....measure.simulate.devices import GIB, device_type
from ....measure.simulate.sizing import (
    COPIES,
    HEAD,
    Link,
    TargetSize,
    best_gain,
    fewest_stages,
    kv_room,
    plain_rate,
    profile_of,
    round_s,
)
from ..doctor import Finding
from .probe import ClusterFacts

# Between GPUs, or processes, of one machine.
WITHIN = Link(latency_s=20e-6, bandwidth=25e9)
# Of requests that should have room at once, and that the cluster is asked for.
ROOM, REQUESTS = 8, (1, 16)
# How often a copied token is right in texts of their own, and in those that repeat others.
ACCEPTANCES = (0.3, 0.7)
# A hop that takes so much of a step is worth a word.
LARGE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Machinery:
    """What stages run on: `memory` bytes of each device, `count` of them, `within` one node."""

    device: Device
    memory: float
    count: int
    within: int
    name: str
    is_gpu: bool


def target_size(model: str, *, has_gpus: bool) -> TargetSize:
    """The target as stages would hold it. Raises `CheckpointError`."""
    from ....models.layers.weight_memory import read_weight_memory  # noqa: PLC0415 - takes seconds
    from ....models.load.model_info import read_model_info  # noqa: PLC0415

    info, memory = read_model_info(model), read_weight_memory(model)
    return TargetSize(
        name=Path(model).name,
        weights=memory.num_weights,
        embeddings=0 if memory.is_tied else info.vocab_size * info.hidden_size,
        layers=info.num_layers,
        hidden_size=info.hidden_size,
        kv_size=info.num_kv_heads * info.head_dim,
        vocab_size=info.vocab_size,
        value_bytes=2 if has_gpus else 4,
    )


def machinery(facts: ClusterFacts) -> Machinery | None:
    """The slowest kind of device, as all stages wait for it; None: GPUs that are not known."""
    gpus = [gpu for node in facts.nodes for gpu in node.gpus]
    if not gpus:
        slowest = min(facts.nodes, key=lambda node: node.bandwidth)
        device = Device(
            bandwidth=slowest.bandwidth,
            bandwidth_share=1,
            operations=slowest.operations,
            operations_share=1,
            attention_share=1,
        )
        memory = min(node.memory for node in facts.nodes)
        count = len(facts.nodes)
        return Machinery(device, memory, count, 1, f"{slowest.cpus} CPUs", is_gpu=False)
    kinds = [device_type(gpu.name) for gpu in gpus]
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    slowest_kind = min(known, key=lambda kind: kind.bandwidth)
    return Machinery(
        slowest_kind.device,
        min(gpu.memory for gpu in gpus),
        len(gpus),
        max(len(node.gpus) for node in facts.nodes),
        slowest_kind.name,
        is_gpu=True,
    )


def slowest_link(facts: ClusterFacts) -> Link | None:
    """The worst of what was measured between nodes; None: nothing was."""
    measured = [link.measured for link in facts.links if link.measured is not None]
    if not measured:
        return None
    latency = max(one.latency_s for one in measured)
    return Link(latency, min(one.bandwidth for one in measured))


def expectations(
    facts: ClusterFacts, target: TargetSize, stages: int | None, context: int
) -> Iterator[Finding]:
    """What to set, and what to expect. Raises `ConfigError` (`stages`)."""
    found = machinery(facts)
    if found is None:
        names = ", ".join({gpu.name for node in facts.nodes for gpu in node.gpus})
        text = f"not predicted: {names} is not among the known GPUs; draftline bench measures"
        yield Finding("prediction", text, ok=False, needed=False)
        return
    if stages is not None and not 0 < stages <= found.count:
        raise ConfigError("stages", f"must be 1 to {found.count}: so many devices are there")
    choices = range(1, found.count + 1) if stages is None else (stages,)
    chosen = fewest_stages(target, found.memory, ROOM * context, choices)
    if chosen is None:
        yield _no_room(found, target, max(choices), context)
        return
    yield from _plan(facts, found, target, chosen, context)


def _no_room(found: Machinery, target: TargetSize, stages: int, context: int) -> Finding:
    room = kv_room(target, stages, found.memory)
    weights = target.weight_bytes / GIB
    return Finding(
        "room",
        f"{stages} of {found.name} have room for {room:,} tokens beside {weights:.1f} GiB of "
        f"weights, not for {ROOM} requests of {context}: more devices (pipeline_parallel_size), "
        "quantization: int8, or a shorter max_model_len",
        ok=False,
    )


def _plan(
    facts: ClusterFacts, found: Machinery, target: TargetSize, stages: int, context: int
) -> Iterator[Finding]:
    spans_nodes = stages > found.within
    between = slowest_link(facts) if spans_nodes else WITHIN
    link = between or WITHIN
    profile = profile_of(target, found.device, stages, link)
    where = "each on a node of its own" if spans_nodes else "on one node"
    strategy = "PACK" if spans_nodes else "STRICT_PACK"
    yield Finding(
        "stages",
        f"pipeline_parallel_size: {stages}, {where} (placement_group_strategy: {strategy}), "
        f"on {found.name}",
    )
    step = round_s(profile, 1, 0, context)
    one, many = (plain_rate(profile, count, context) for count in REQUESTS)
    yield Finding(
        "step",
        f"{1e3 * step:.1f} ms for a token of one request; plainly {one:.0f} tokens/s of one, "
        f"{many:.0f} of {REQUESTS[1]} together",
    )
    if stages > 1:
        yield _hops(stages, profile.hop_s, step)
    room = kv_room(target, stages, found.memory)
    setting = "" if found.is_gpu else "; a CPU takes kv_cache_tokens: 16384 unless told more"
    yield Finding(
        "KV", f"room for {room:,} tokens: {room // context:,} requests of {context}{setting}"
    )
    for source, what in (
        (COPIES, "copied text (suffix, prompt_lookup, retrieval)"),
        (HEAD, "a head"),
    ):
        for acceptance in ACCEPTANCES:
            gains = [best_gain(profile, count, context, acceptance, source) for count in REQUESTS]
            yield _gain(what, acceptance, [gain.factor for gain in gains], gains[0].nodes)


def _hops(stages: int, hop_s: float, step: float) -> Finding:
    share = stages * hop_s / step
    text = f"{1e3 * hop_s:.2f} ms each, {share:.0%} of a step"
    if share < LARGE_SHARE:
        return Finding("messages", text)
    advice = "fewer stages, or nodes that are nearer (a placement group of the cloud, one zone)"
    return Finding("messages", f"{text}: {advice}", ok=False, needed=False)


def _gain(what: str, acceptance: float, factors: list[float], nodes: int) -> Finding:
    one, many = factors
    text = (
        f"{what}, {acceptance:.0%} right: {one:.2f}x for one request, {many:.2f}x for {REQUESTS[1]}"
    )
    if one <= 1.02:
        return Finding("speculation", f"{text}: does not pay, and is left out by itself")
    return Finding("speculation", f"{text}; tree_nodes: {nodes} or more")
