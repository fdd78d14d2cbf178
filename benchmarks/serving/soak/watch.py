"""What the server's own metrics tell, while its HTTP replicas come and go."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import httpx
import redis

from ....deploy.api.http.gate import LEASE_S
from ....deploy.engine.usage_log import STREAM
from ....deploy.tenants import AUDIT, TENANTS, VERSION
from ....retrieval_store.redis_store.client import RedisClient, as_text
from ....retrieval_store.serving.open_store import open_store
from ..ray_servers import Process

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
REDIS_TIMEOUT_S = 5.0
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
    prefix = RedisClient(url, RETRIEVAL, timeout=REDIS_TIMEOUT_S).prefix
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


PERIOD_S = 0.5
TIMEOUT_S = 10.0
GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
COUNTERS = ("resumed", "lost")
# The HTTP replica that counted what its page tells.
INGRESS = re.compile(r'^vllm:inter_token_latency_seconds_count{.*ingress="(\w+)"', re.MULTILINE)
# A page of which nobody can tell whose it is.
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the engines hold, all together; `engines`: how many told of themselves."""

    engines: int
    kv_usage: float
    running: float
    waiting: float

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or waits, and no block is held."""
        return not (self.kv_usage or self.running or self.waiting)


class Watch:
    """Reads `/metrics` again and again. Each HTTP replica counts by itself, from its start on."""

    def __init__(self, client: httpx.AsyncClient, headers: Mapping[str, str]) -> None:
        self._client = client
        self._headers = headers
        self._counts: dict[str, Counter[tuple[str, str]]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(httpx.HTTPError):
                await self.read()
            await asyncio.sleep(PERIOD_S)

    async def read(self) -> Holdings:
        """Read one replica's page. Raises `httpx.HTTPError`."""
        # A connection of its own, so that replicas take turns.
        headers = {**self._headers, "connection": "close"}
        answer = await self._client.get("/metrics", headers=headers, timeout=TIMEOUT_S)
        page = answer.raise_for_status().text
        ingress = INGRESS.search(page)
        self._counts[ingress[1] if ingress else UNKNOWN] = _counters(page)
        values = [_values(page, name) for name in GAUGES]
        return Holdings(len(values[0]), *map(sum, values))

    def totals(self) -> dict[str, dict[str, int]]:
        """Requests that were resumed and lost, by cause."""
        totals = sum(self._counts.values(), Counter[tuple[str, str]]())
        return {
            what: {cause: count for (name, cause), count in totals.items() if name == what}
            for what in COUNTERS
        }

    @property
    def num_pages(self) -> int:
        """HTTP replicas that were seen."""
        return len(self._counts)


def _counters(page: str) -> Counter[tuple[str, str]]:
    pattern = rf'^draftline:({"|".join(COUNTERS)})_requests_total{{.*cause="(\w+)".*}} (\S+)$'
    found = re.findall(pattern, page, re.MULTILINE)
    return Counter({(what, cause): int(float(value)) for what, cause, value in found})


def _values(page: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", page, re.MULTILINE)]
