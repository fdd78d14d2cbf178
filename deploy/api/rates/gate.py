"""Whether a tenant's request may go on, by its limits. Never a crash, never a wait for long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from limits.aio.storage import MemoryStorage, RedisStorage
from limits.errors import StorageError
from redis import RedisError
from redis.asyncio import Redis

from ...settings.settings import ServerConfig
from .places import LocalPlaces, Places, RedisPlaces
from .rates import Rates
from .verdict import ALLOWED, Kind, Limits, Rate, Verdict

T = TypeVar("T")
logger = logging.getLogger(__name__)

# What a request waits for Redis at most; and how long it is not asked after it failed.
TIMEOUT_S = 0.25
PAUSE_S = 1.0
# What a server's start waits for Redis at most.
START_TIMEOUT_S = 2.0
# How often what was generated is counted, and places are renewed.
PERIOD_S = 1.0
# Until one of a tenant's own requests ends, nobody knows how long.
PLACE_WAIT_S = 1.0


class Gate(Protocol):
    """Limits of tenants, shared by whoever shares the gate. Raises nothing."""

    async def start(self) -> None:
        """Get ready; called on the loop that uses it."""
        ...

    async def close(self) -> None:
        """Count what is left to count."""
        ...

    async def enter(self, limits: Limits, request_id: str) -> Verdict:
        """A request comes: counts it, and gives it a place, which it must leave if it may go on."""
        ...

    def leave(self, limits: Limits, request_id: str) -> None:
        """It has ended."""
        ...

    async def take_tokens(self, limits: Limits, count: int) -> Verdict:
        """A prompt of so many tokens comes."""
        ...

    def charge(self, limits: Limits, count: int) -> None:
        """So many tokens were generated."""
        ...


class CountingGate:
    """Counts in memory, or in Redis where there is a URL.

    is_open     whether requests go on while Redis does not answer; else they are refused
    on_failure  called where it did not
    """

    def __init__(
        self, url: str | None = None, *, is_open: bool = True,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._url = url
        self._failed = ALLOWED if is_open else Verdict(reason="unavailable")
        self._on_failure = on_failure
        self._paused_until = 0.0
        self._counts: tuple[Rates, Places] | None = None
        self._charges: Counter[str] = Counter()
        self._leaving: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to count what is charged."""
        self._task = asyncio.create_task(self._run())
        if self._url is not None:
            self._parts()
            # The first request is not to wait for a connection. Where there is none, it will tell.
            with suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._client.ping()

    async def close(self) -> None:
        """Count the rest."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*self._leaving)
        await self._flush()
        if self._counts is not None and self._url is not None:
            await self._close_redis()

    async def enter(self, limits: Limits, request_id: str) -> Verdict:
        """Count a request, and give it a place."""
        verdict = await self._tried(lambda: self._enter(limits, request_id))
        return self._failed if verdict is None else verdict

    def leave(self, limits: Limits, request_id: str) -> None:
        """Give its place back, soon."""
        if limits.concurrency is not None:
            leaving = asyncio.create_task(self._leave(limits.tenant, request_id))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def take_tokens(self, limits: Limits, count: int) -> Verdict:
        """Count a prompt."""
        if limits.tokens is None:
            return ALLOWED
        verdict = await self._tried(partial(self._take_tokens, limits.tenant, limits.tokens, count))
        return self._failed if verdict is None else verdict

    def charge(self, limits: Limits, count: int) -> None:
        """Count generated tokens, within a second."""
        if limits.tokens is not None:
            self._charges[limits.tenant] += count

    async def _enter(self, limits: Limits, request_id: str) -> Verdict:
        rates, places = self._parts()
        told: dict[str, Rate] = {}
        if limits.requests is not None:
            is_taken, told["requests"] = await rates.take(
                "requests", limits.tenant, limits.requests, 1
            )
            if not is_taken:
                return _refused("requests", told)
        most = limits.concurrency
        if most is not None and not await places.take(limits.tenant, most, request_id):
            return Verdict(reason="concurrency", rates=told, limit=most, wait_s=PLACE_WAIT_S)
        return Verdict(rates=told)

    async def _take_tokens(self, tenant: str, limit: int, count: int) -> Verdict:
        is_taken, rate = await self._parts()[0].take("tokens", tenant, limit, count)
        told = {"tokens": rate}
        return Verdict(rates=told) if is_taken else _refused("tokens", told)

    async def _leave(self, tenant: str, request_id: str) -> None:
        places = self._parts()[1]
        await self._tried(lambda: places.leave(tenant, request_id))
        # Where Redis is out of reach the lease ends by itself, unless it is renewed for ever.
        places.forget(tenant, request_id)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._flush()
            if self._counts is not None:
                await self._tried(self._counts[1].renew)

    async def _flush(self) -> None:
        charges, self._charges = self._charges, Counter()
        for tenant, count in charges.items():
            await self._tried(partial(self._parts()[0].charge, "tokens", tenant, count))

    async def _tried(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """What is answered in time; None where Redis fails, or did so a moment ago."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            async with asyncio.timeout(TIMEOUT_S if self._url else None):
                return await ask()
        except (StorageError, RedisError, OSError, TimeoutError) as error:
            self._paused_until = time.monotonic() + PAUSE_S
            self._on_failure()
            logger.error("event=rate_limit_store_failed error=%s", type(error).__name__)
            return None

    def _parts(self) -> tuple[Rates, Places]:
        """Where things are counted, made when the first of them is."""
        if self._counts is None:
            if self._url is None:
                self._counts = Rates(MemoryStorage()), LocalPlaces()
            else:
                # Callers try again themselves, after a pause.
                self._client = Redis.from_url(self._url, socket_connect_timeout=TIMEOUT_S)
                pool: Any = self._client.connection_pool
                storage = RedisStorage(
                    f"async+{self._url}", implementation="redispy",
                    connection_pool=pool,
                )  # fmt: skip
                self._counts = Rates(storage), RedisPlaces(self._client)
        return self._counts

    async def _close_redis(self) -> None:
        with suppress(RedisError, OSError):
            await self._client.connection_pool.disconnect(inuse_connections=True)


def _refused(kind: Kind, rates: Mapping[str, Rate]) -> Verdict:
    rate = rates[kind]
    return Verdict(reason=kind, rates=rates, limit=rate.limit, wait_s=rate.wait_s)


def gate_of(config: ServerConfig, on_failure: Callable[[], object]) -> CountingGate:
    """The gate that a server's settings ask for."""
    is_open = config.rate_limit_on_failure == "open"
    return CountingGate(config.rate_limit_store, is_open=is_open, on_failure=on_failure)
