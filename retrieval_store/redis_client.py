"""A Redis client with the names of a store's keys."""

from __future__ import annotations

from contextlib import AbstractContextManager

from .redis_connection import connect, reported, shown_url

TIMEOUT_S = 2.0


class RedisClient:
    """A client and what names it in messages.

    raw     the client; see `connect`
    url     without user, password and query
    prefix  of all keys; its hash tag keeps them on one node of a Redis Cluster
    """

    def __init__(self, url: str, name: str, timeout: float) -> None:
        """`timeout` is in seconds, for each round trip. Raises `ConfigError` for a bad URL."""
        self.raw = connect(url, timeout)
        self.url = shown_url(url)
        self.prefix = f"{{draftline:{name}}}"
        self.manifest = f"{self.prefix}:manifest"
        self.learning = f"{self.prefix}:learning"
        self.channel = f"{self.prefix}:changes"

    def reported(self) -> AbstractContextManager[None]:
        """Raises `StoreError` for what Redis raises."""
        return reported(self.url)


def as_text(value: bytes | str) -> str:
    """What Redis answered, as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
