"""Deletes a namespace from Redis: every key that names it, of any version or model."""

from __future__ import annotations

from ...core.errors import StoreError
from .client import TIMEOUT_S, RedisClient, as_text
from .delta_log import namespace_lock, release

# Keys of these kinds have a namespace after the kind. The lock has one, too, but holds no data and
# expires; a folder may take it at any time.
KINDS = frozenset({"chunk", "delta", "folded"})
# Seconds to wait for a running fold.
LOCK_WAIT_S = 30.0


class RedisEraser:
    """Implements `NamespaceEraser` over the URL and name of a `RedisStore`."""

    def __init__(self, url: str, name: str = "retrieval", timeout: float = TIMEOUT_S) -> None:
        self._redis = RedisClient(url, name, timeout)
        self._client = self._redis.raw
        self._hashes = (self._redis.manifest, f"{self._redis.prefix}:epochs")

    def erase(self, namespace: str) -> None:
        """Delete a namespace in one transaction. Raises `StoreError` if a fold does not end."""
        lock = namespace_lock(self._redis, namespace)
        with self._redis.reported():
            if not lock.acquire(blocking=True, blocking_timeout=LOCK_WAIT_S):
                raise StoreError(f"namespace {namespace} is being folded; try again")
        try:
            keys = self._keys(namespace)
            fields = [(name, self._fields(name, namespace)) for name in self._hashes]
            with self._redis.reported(), self._client.pipeline(transaction=True) as change:
                for name, named in fields:
                    if named:
                        change.hdel(name, *named)
                if keys:
                    change.unlink(*keys)
                change.publish(self._redis.channel, namespace)
                change.execute()
        finally:
            release(self._redis, lock)

    def remains(self, namespace: str) -> list[str]:
        """Keys of the namespace, and its fields of the hashes that name all namespaces, sorted."""
        fields = [
            f"{name} {field}" for name in self._hashes for field in self._fields(name, namespace)
        ]
        return sorted(self._keys(namespace) + fields)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _keys(self, namespace: str) -> list[str]:
        # The pattern contains no namespace, whose name could be read as a glob by Redis.
        start = f"{self._redis.prefix}:"
        with self._redis.reported():
            keys = [as_text(key) for key in self._client.scan_iter(f"{start}*", count=1000)]
        split = {key: key.removeprefix(start).split(":") for key in keys}
        return [
            key
            for key, parts in split.items()
            if len(parts) > 1 and parts[0] in KINDS and parts[1] == namespace
        ]

    def _fields(self, name: str, namespace: str) -> list[str]:
        with self._redis.reported():
            fields = [as_text(field) for field in self._client.hkeys(name)]
        return [field for field in fields if field.startswith(f"{namespace}/")]
