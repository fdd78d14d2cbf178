"""What the server's own metrics tell, while its HTTP replicas come and go."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import httpx

PERIOD_S = 0.5
TIMEOUT_S = 10.0
GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
COUNTERS = ("resumed", "lost")
# When a replica made its page: no two make it at the same time.
PAGE_MADE = re.compile(r"^vllm:inter_token_latency_seconds_created{.*} (\S+)$", re.MULTILINE)
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
        made = PAGE_MADE.search(page)
        self._counts[made[1] if made else UNKNOWN] = _counters(page)
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
