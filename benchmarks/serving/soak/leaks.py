"""What is left once all requests have ended: KV, processes, what these hold, keys in Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import httpx
import redis

from ....deploy.api.rates.gate import LEASE_S
from ....deploy.engine.usage_log import STREAM
from ....deploy.tenants.redis_store import AUDIT, TENANTS, VERSION
from ....retrieval_store.redis_store.client import RedisClient, as_text
from ....retrieval_store.serving.open_store import open_store
from ..on_ray.processes import Process
from .watch import Holdings, Watch

QUIET_TIMEOUT_S = 600.0
POLL_S = 1.0
# Places that a dead HTTP replica held are free by then.
SETTLE_S = LEASE_S + 5.0
# Ray keeps workers that it has no use for, and starts some ahead.
SPARE_ROLES = ("ray::IDLE", "ended")
ENGINE = "ray::ServeReplica:draftline:engine"
GRAMMARS = "python draftline.models.text.grammar_worker"
# Keys of tenants and usage, and the beginning of those of places.
OWNED = (TENANTS, VERSION, AUDIT, STREAM)
PLACES = "draftline:places:"
RETRIEVAL = "retrieval"
TIMEOUT_S = 5.0
# What Redis says of a key that does not expire.
FOR_EVER = -1
# Connections and pool threads that come and go: over 19 faults no role's fullest process gained
# more than 2 descriptors and 1 thread. What leaks with each fault or request is many times that.
FD_SLACK, THREAD_SLACK = 8, 4


async def wait_for_quiet(watch: Watch, replicas: int) -> Holdings | None:
    """What the engines hold once nothing runs and all replicas are there, or at the deadline.

    None: nobody could be asked.
    """
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    holdings = None
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            holdings = await watch.read()
            if holdings.engines == replicas and holdings.is_empty:
                break
        await asyncio.sleep(POLL_S)
    return holdings


def process_leaks(before: Sequence[Process], after: Sequence[Process]) -> list[str]:
    """Processes that are too many, and such as hold more than those of their role did before."""
    return [*_too_many(before, after), *_too_full(before, after)]


def _too_many(before: Sequence[Process], after: Sequence[Process]) -> Iterator[str]:
    roles_before = Counter(process.role for process in before)
    for role, count in Counter(process.role for process in after).items():
        expected = roles_before[role]
        if role == GRAMMARS:
            # Each engine starts one with its first grammar.
            expected = max(expected, roles_before[ENGINE])
        if count > expected and role not in SPARE_ROLES:
            yield f"{count} processes {role}, {expected} at the start"


def _too_full(before: Sequence[Process], after: Sequence[Process]) -> Iterator[str]:
    for process in after:
        alike = [one for one in before if one.role == process.role]
        if not alike or process.role in SPARE_ROLES:
            continue
        fds, threads = max(one.fds for one in alike), max(one.threads for one in alike)
        if process.fds > fds + FD_SLACK:
            yield f"{process.role} {process.pid}: {process.fds} descriptors, {fds} at the start"
        if process.threads > threads + THREAD_SLACK:
            yield f"{process.role} {process.pid}: {process.threads} threads, {threads} at the start"


def key_leaks(url: str) -> list[str]:
    """Keys of a Redis that nobody owns: neither of a store, nor such as expire by themselves."""
    client = redis.Redis.from_url(url)
    prefix = RedisClient(url, RETRIEVAL, timeout=TIMEOUT_S).prefix
    manifest = open_store(url).manifest()
    chunks = tuple(
        f"{prefix}:chunk:{namespace}:{segment_id}:"
        for namespace in manifest.sizes
        for segment_id in manifest.segment_ids(namespace)
    )
    found = []
    for key in map(as_text, client.scan_iter()):
        is_chunk = key.startswith(f"{prefix}:chunk:")
        is_stored = key.startswith(chunks if is_chunk else f"{prefix}:")
        if key.startswith(PLACES):
            found.append(f"{key}: places that nobody has given back")
        elif not is_stored and key not in OWNED and client.ttl(key) == FOR_EVER:
            found.append(f"{key}: nobody's, and without an end")
    return found
