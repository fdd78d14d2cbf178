"""How many requests of a tenant are in progress: counted in this process, or in Redis."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Protocol

from redis.asyncio import Redis

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


class Places(Protocol):
    """Requests in progress, by tenant. What Redis raises is passed on."""

    async def take(self, tenant: str, most: int, request_id: str) -> bool:
        """Take a place of `most`; False where none is free."""
        ...

    async def leave(self, tenant: str, request_id: str) -> None:
        """Give a place back; one that was not taken is ignored."""
        ...

    def forget(self, tenant: str, request_id: str) -> None:
        """Say no more that its holder lives; one that was given back is ignored."""
        ...

    async def renew(self) -> None:
        """Say that the holders of places live; called about once a second."""
        ...


class LocalPlaces:
    """Places of the requests that pass this process."""

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
        """Nothing: they end with this process."""


class RedisPlaces:
    """Places that all servers with one Redis share: a sorted set a tenant, with leases."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._take: Any = client.register_script(TAKE)
        self._renew: Any = client.register_script(RENEW)
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        self._renewed_at = 0.0

    async def take(self, tenant: str, most: int, request_id: str) -> bool:
        """Take a place of `most`; False where none is free."""
        taken = await self._take(keys=[_key(tenant)], args=[most, request_id, LEASE_S])
        if taken:
            self._held[tenant].add(request_id)
        return bool(taken)

    async def leave(self, tenant: str, request_id: str) -> None:
        """Give a place back."""
        if request_id in self._held.get(tenant, ()):
            self.forget(tenant, request_id)
            await self._client.zrem(_key(tenant), request_id)

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
            await self._renew(keys=[_key(tenant)], args=[LEASE_S, *held])


def _key(tenant: str) -> str:
    return f"draftline:places:{tenant}"
