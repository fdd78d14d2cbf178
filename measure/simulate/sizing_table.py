"""The table of the sizing guide: well-known sizes of models on well-known GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from .cost_profile import Network
from .devices import DEVICE_TYPES, DeviceType
from .sizing import (
    COPIES,
    HEAD,
    Link,
    TargetSize,
    best_gain,
    fewest_stages,
    kv_room,
    plain_rate,
    pool_servers,
    profile_of,
    round_s,
)

# Their public configurations, at 16 bits.
TARGETS = (
    TargetSize(
        name="8B", weights=8.03e9, embeddings=128256 * 4096, layers=32, hidden_size=4096,
        kv_size=1024, vocab_size=128256, value_bytes=2,
    ),
    TargetSize(
        name="32B", weights=32.76e9, embeddings=151936 * 5120, layers=64, hidden_size=5120,
        kv_size=1024, vocab_size=151936, value_bytes=2,
    ),
    TargetSize(
        name="70B", weights=70.55e9, embeddings=128256 * 8192, layers=80, hidden_size=8192,
        kv_size=1024, vocab_size=128256, value_bytes=2,
    ),
)  # fmt: skip
GPUS = ("L4", "L40S", "A100", "H100", "H200")
# Nodes of a data centre, 100 Gbit/s.
LINK = Link(latency_s=50e-6, bandwidth=12.5e9)
STAGES = (1, 2, 4, 8)
# Tokens of each request, and the requests that must have room at once.
CONTEXT, ROOM = 2048, 8
REQUESTS = (1, 8, 32, 128)
# How often a copied token is right: in texts that go their own way, in those that repeat what was
# read.
RARELY, OFTEN = 0.3, 0.7
# How often that of a trained head is right.
OF_A_HEAD = 0.7
# Servers of a pool are counted for so many requests, drafts of so many tokens, and Llama-3.2-1B.
POOL_REQUESTS, POOL_DEPTH = 32, 5
SMALL = Network(bytes=2.472e9, operations=2.472e9, pass_s=0.4e-3)
COLUMNS = (
    "model", "GPU", "stages", "KV, tokens", "ms a step", "plain, tokens/s at 1 / 32",
    "copies, 3 of 10 right", "copies, 7 of 10 right", "a head, 7 of 10 right", "pool servers",
)  # fmt: skip


def sizing_rows() -> Iterator[tuple[str, ...]]:
    """Cells by row, in the order of `COLUMNS`; each model on each GPU with the fewest stages that
    have room for it.
    """
    kinds = {kind.name: kind for kind in DEVICE_TYPES}
    for target in TARGETS:
        for name in GPUS:
            stages = fewest_stages(target, kinds[name].memory, ROOM * CONTEXT, STAGES)
            if stages is not None:
                yield _row(target, kinds[name], stages)


def _row(target: TargetSize, kind: DeviceType, stages: int) -> tuple[str, ...]:
    profile = profile_of(target, kind.device, stages, LINK)
    room = kv_room(target, stages, kind.memory)

    def rate(requests: int) -> str:
        fits = requests * CONTEXT <= room
        return f"{plain_rate(profile, requests, CONTEXT):,.0f}" if fits else "-"

    def gains(acceptance: float, source: str) -> str:
        factors = [
            f"{best_gain(profile, count, CONTEXT, acceptance, source).factor:.1f}"
            if count * CONTEXT <= room
            else "-"
            for count in REQUESTS
        ]
        return " / ".join(factors)

    every_s = round_s(profile, POOL_REQUESTS, POOL_DEPTH, CONTEXT)
    servers = pool_servers(POOL_REQUESTS, SMALL, kind.device, POOL_DEPTH, every_s)
    return (
        target.name,
        kind.name,
        str(stages),
        f"{room:,}",
        f"{1e3 * round_s(profile, 1, 0, CONTEXT):.1f}",
        f"{rate(1)} / {rate(32)}",
        gains(RARELY, COPIES),
        gains(OFTEN, COPIES),
        gains(OF_A_HEAD, HEAD),
        _pool(servers) if room >= POOL_REQUESTS * CONTEXT else "-",
    )


def _pool(servers: int | None) -> str:
    return "too slow" if servers is None else str(servers)


def markdown() -> str:
    """The table as the guide has it."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *sizing_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
