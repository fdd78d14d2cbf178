"""Room in Redis: an upload must not make it evict what it holds, or refuse half-way."""

from __future__ import annotations

import logging

import redis
from redis.exceptions import NoPermissionError

from ...core.errors import StoreError

logger = logging.getLogger(__name__)

# Redis's allocator rounds a block of up to 4 MiB up by at most this.
ROUNDING_BYTES = 2**20


def require_room(client: redis.Redis, num_bytes: int, url: str) -> None:
    """Raise `StoreError` if so many bytes more would pass `maxmemory`.

    Passes where Redis has no limit, and where the user may not ask for it (`INFO`): Redis itself
    then refuses at the limit, or evicts.
    """
    try:
        memory = client.info("memory")
    except NoPermissionError:
        return
    limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
    if limit and used + num_bytes + ROUNDING_BYTES > limit:
        raise StoreError(
            f"{url}: {num_bytes} bytes do not fit: used_memory is {used} of maxmemory {limit} "
            f"(maxmemory-policy {_policy(memory)}); raise maxmemory, or remove segments"
        )


def warn_of_eviction(client: redis.Redis, url: str) -> None:
    """Log a warning if Redis may evict segments when other data fill it."""
    try:
        memory = client.info("memory")
    except NoPermissionError:
        return
    if int(memory.get("maxmemory", 0)) and _policy(memory).startswith("allkeys"):
        logger.warning(
            "event=retrieval_store_may_evict store=%s maxmemory-policy=%s; "
            "set noeviction or a volatile policy",
            url,
            _policy(memory),
        )


def _policy(memory: dict[str, object]) -> str:
    return str(memory.get("maxmemory_policy", "unknown"))
