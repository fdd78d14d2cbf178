"""Admits requests of tenants by their limits. Never raises, and never waits long."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, Protocol, TypeVar, cast

from limits.aio.storage import MemoryStorage, RedisStorage, Storage
from limits.aio.storage.base import SlidingWindowCounterSupport
from limits.errors import StorageError
from redis import RedisError
from redis.asyncio import Redis

from ....retrieval_store.redis_store.client import with_password
from ...settings.settings import ServerConfig
from ...settings.tenants import TenantConfig
from ..errors import RETRY_AFTER_S, ApiError

Kind = Literal["requests", "tokens"]
Reason = Literal["", "requests", "tokens", "concurrency", "unavailable"]

# The tenant's setting of each limit.
SETTINGS = {
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "concurrency": "max_concurrency",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None: there is none."""

    tenant: str
    requests: int | None = None
    tokens: int | None = None
    concurrency: int | None = None

    @classmethod
    def of(cls, tenant: TenantConfig) -> TenantLimits:
        """Those of its settings."""
        return cls(
            tenant=tenant.name,
            requests=tenant.requests_per_minute,
            tokens=tenant.tokens_per_minute,
            concurrency=tenant.max_concurrency,
        )

    @property
    def are_any(self) -> bool:
        """Whether anything needs to be counted."""
        return (self.requests, self.tokens, self.concurrency) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The state of one limit of a tenant.

    remaining  of it, now
    reset_s    until all of it is there again
    wait_s     until what was asked for is there; infinite where it is more than the whole limit
    """

    limit: int
    remaining: int
    reset_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a request is admitted, and why not.

    rates  state of the tenant's limits, as far as it is known
    limit  that a refused request exceeded
    """

    reason: Reason = ""
    rates: Mapping[str, Rate] = field(default_factory=dict)
    limit: int = 0
    wait_s: float = 0.0

    @property
    def is_allowed(self) -> bool:
        """Whether the request is admitted."""
        return not self.reason

    def error(self) -> ApiError:
        """The error of a refused request."""
        if self.reason == "unavailable":
            return ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the limits of this key cannot be looked up now, please retry",
                retry_after_s=RETRY_AFTER_S,
            )
        setting = SETTINGS[self.reason]
        if math.isinf(self.wait_s):
            return ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the prompt has more tokens than this key may send in a minute ({self.limit}, "
                f"{setting}); send a shorter one",
            )
        seconds = max(math.ceil(self.wait_s), 1)
        what = "requests at once" if self.reason == "concurrency" else f"{self.reason} a minute"
        return ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"this key may have {self.limit} {what} ({setting}); try again in {seconds} s",
            retry_after_s=seconds,
        )

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*`, by OpenAI's names and forms."""
        headers = {}
        for kind, rate in self.rates.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration(rate.reset_s)
        return headers


ALLOWED = Verdict()


def duration(seconds: float) -> str:
    """As OpenAI writes times: `120ms`, `7.66s`, `1m30s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


WINDOW_S = 60
# Above any count: what has been generated is charged also where nothing is left.
NO_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class Window:
    """Counts of the last and the current minute, and seconds until each expires.

    `now_left_s` counts to the end of the minute after the running one, as the library has it.
    """

    before: int
    before_left_s: float
    now: int
    now_left_s: float

    @property
    def used(self) -> float:
        """Count over the last 60 s."""
        return self.before * self.before_left_s / WINDOW_S + self.now

    @property
    def reset_s(self) -> float:
        """Seconds until nothing is used."""
        if self.now:
            return self.now_left_s
        return self.before_left_s if self.before else 0.0

    def wait_s(self, limit: int, cost: int) -> float:
        """Seconds until `cost` fits without other requests; infinite if it never does."""
        room = limit - cost
        if room < 0:
            return math.inf
        if math.floor(self.used) <= room:
            return 0.0
        if self.now <= room:
            # The minute before runs out.
            return self.before_left_s - (room - self.now) * WINDOW_S / self.before
        # Then the running one does, once it is the one before.
        until_next = max(self.now_left_s - WINDOW_S, 0.0)
        return until_next + WINDOW_S * (1 - room / self.now)


class RateCounts:
    """Counts of all tenants in one storage. What the storage raises is passed on."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._windows = cast("SlidingWindowCounterSupport", storage)

    async def take(self, kind: Kind, tenant: str, limit: int, cost: int) -> tuple[bool, Rate]:
        """Count `cost` if it fits; whether it did, and where the tenant stands then."""
        key = _rate_key(kind, tenant)
        is_taken = await self._windows.acquire_sliding_window_entry(key, limit, WINDOW_S, cost)
        found = await self._windows.get_sliding_window(key, WINDOW_S)
        window = Window(*(max(value or 0, 0) for value in found))  # pyright: ignore[reportArgumentType]
        left = max(limit - math.floor(window.used), 0)
        wait_s = 0.0 if is_taken else max(window.wait_s(limit, cost), 0.001)
        return is_taken, Rate(limit=limit, remaining=left, reset_s=window.reset_s, wait_s=wait_s)

    async def charge(self, kind: Kind, tenant: str, cost: int) -> None:
        """Count what has already happened, also beyond the limit."""
        await self._windows.acquire_sliding_window_entry(
            _rate_key(kind, tenant), NO_LIMIT, WINDOW_S, cost
        )


def _rate_key(kind: Kind, tenant: str) -> str:
    """The key has no limit in it: a changed limit keeps the counts."""
    return f"draftline/{kind}/{tenant}"


# A place of a process that died is free again after so long; living ones are renewed before.
LEASE_S = 30
RENEWAL_S = 10

TAKE = """
local now = redis.call('TIME')[1]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""
RENEW = """
local ends = redis.call('TIME')[1] + tonumber(ARGV[1])
for place = 2, #ARGV do redis.call('ZADD', KEYS[1], ends, ARGV[place]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""


class LocalPlaces:
    """Requests in progress, by tenant, of those that pass this process."""

    def __init__(self) -> None:
        self._taken: defaultdict[str, set[str]] = defaultdict(set)

    async def take(self, tenant: str, most: int, request_id: str) -> bool:
        """Take a place of `most`; False where none is free."""
        if len(self._taken[tenant]) >= most:
            return False
        self._taken[tenant].add(request_id)
        return True

    async def leave(self, tenant: str, request_id: str) -> None:
        """Give a place back."""
        self.forget(tenant, request_id)

    def forget(self, tenant: str, request_id: str) -> None:
        """Give a place back: there are no leases that would end."""
        taken = self._taken.get(tenant)
        if taken is not None:
            taken.discard(request_id)
            if not taken:
                del self._taken[tenant]

    async def renew(self) -> None:
        """Nothing: there are no leases."""


class RedisPlaces:
    """The same of all servers with one Redis: a sorted set a tenant, with leases.

    What Redis raises is passed on.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._take: Any = client.register_script(TAKE)
        self._renew: Any = client.register_script(RENEW)
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        self._renewed_at = 0.0

    async def take(self, tenant: str, most: int, request_id: str) -> bool:
        """Take a place of `most`; False where none is free."""
        taken = await self._take(keys=[_places_key(tenant)], args=[most, request_id, LEASE_S])
        if taken:
            self._held[tenant].add(request_id)
        return bool(taken)

    async def leave(self, tenant: str, request_id: str) -> None:
        """Give a place back."""
        if request_id in self._held.get(tenant, ()):
            self.forget(tenant, request_id)
            await self._client.zrem(_places_key(tenant), request_id)

    def forget(self, tenant: str, request_id: str) -> None:
        """Renew its lease no more."""
        held = self._held.get(tenant)
        if held is not None:
            held.discard(request_id)
            if not held:
                del self._held[tenant]

    async def renew(self) -> None:
        """Renew the leases, now and then."""
        now = time.monotonic()
        if now - self._renewed_at < RENEWAL_S:
            return
        self._renewed_at = now
        for tenant, held in list(self._held.items()):
            await self._renew(keys=[_places_key(tenant)], args=[LEASE_S, *held])


Places = LocalPlaces | RedisPlaces


def _places_key(tenant: str) -> str:
    return f"draftline:places:{tenant}"


T = TypeVar("T")
logger = logging.getLogger(__name__)

# What a request waits for Redis at most; and how long it is not asked after it failed.
TIMEOUT_S = 0.25
PAUSE_S = 1.0
# What a server's start waits for Redis at most.
START_TIMEOUT_S = 2.0
# How often what was generated is counted, and places are renewed.
PERIOD_S = 1.0
# How long until one of the tenant's own requests ends is unknown.
PLACE_WAIT_S = 1.0


class Gate(Protocol):
    """Limits of tenants over all users of the gate. Raises nothing."""

    async def start(self) -> None:
        """Get ready; called on the loop that uses it."""
        ...

    async def close(self) -> None:
        """Count what is left to count."""
        ...

    async def enter(self, limits: TenantLimits, request_id: str) -> Verdict:
        """A request comes: counts it, and gives it a place, which it must leave if it may go on."""
        ...

    def leave(self, limits: TenantLimits, request_id: str) -> None:
        """It has ended."""
        ...

    async def take_tokens(self, limits: TenantLimits, count: int) -> Verdict:
        """A prompt of so many tokens comes."""
        ...

    def charge(self, limits: TenantLimits, count: int) -> None:
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
        self._url = None if url is None else with_password(url)
        self._failed = ALLOWED if is_open else Verdict(reason="unavailable")
        self._on_failure = on_failure
        self._paused_until = 0.0
        self._counts: tuple[RateCounts, Places] | None = None
        self._charges: Counter[str] = Counter()
        self._leaving: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to count what is charged."""
        self._task = asyncio.create_task(self._run())
        if self._url is not None:
            self._parts()
            # So the first request need not wait for a connection. It reports a failure, too.
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

    async def enter(self, limits: TenantLimits, request_id: str) -> Verdict:
        """Count a request, and give it a place."""
        verdict = await self._tried(lambda: self._enter(limits, request_id))
        return self._failed if verdict is None else verdict

    def leave(self, limits: TenantLimits, request_id: str) -> None:
        """Give its place back, soon."""
        if limits.concurrency is not None:
            leaving = asyncio.create_task(self._leave(limits.tenant, request_id))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def take_tokens(self, limits: TenantLimits, count: int) -> Verdict:
        """Count a prompt."""
        if limits.tokens is None:
            return ALLOWED
        verdict = await self._tried(partial(self._take_tokens, limits.tenant, limits.tokens, count))
        return self._failed if verdict is None else verdict

    def charge(self, limits: TenantLimits, count: int) -> None:
        """Count generated tokens, within a second."""
        if limits.tokens is not None:
            self._charges[limits.tenant] += count

    async def _enter(self, limits: TenantLimits, request_id: str) -> Verdict:
        rates, places = self._parts()
        standing: dict[str, Rate] = {}
        if limits.requests is not None:
            is_taken, standing["requests"] = await rates.take(
                "requests", limits.tenant, limits.requests, 1
            )
            if not is_taken:
                return _refused("requests", standing)
        most = limits.concurrency
        if most is not None and not await places.take(limits.tenant, most, request_id):
            return Verdict(reason="concurrency", rates=standing, limit=most, wait_s=PLACE_WAIT_S)
        return Verdict(rates=standing)

    async def _take_tokens(self, tenant: str, limit: int, count: int) -> Verdict:
        is_taken, rate = await self._parts()[0].take("tokens", tenant, limit, count)
        standing = {"tokens": rate}
        return Verdict(rates=standing) if is_taken else _refused("tokens", standing)

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
        """The result in time; None if Redis fails, or failed a moment ago."""
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

    def _parts(self) -> tuple[RateCounts, Places]:
        """The counters, made at the first use."""
        if self._counts is None:
            if self._url is None:
                self._counts = RateCounts(MemoryStorage()), LocalPlaces()
            else:
                # Callers try again themselves, after a pause.
                self._client = Redis.from_url(self._url, socket_connect_timeout=TIMEOUT_S)
                pool: Any = self._client.connection_pool
                storage = RedisStorage(
                    f"async+{self._url}", implementation="redispy",
                    connection_pool=pool,
                )  # fmt: skip
                self._counts = RateCounts(storage), RedisPlaces(self._client)
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
