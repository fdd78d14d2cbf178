"""Connections to Redis, with failures as `StoreError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..core.errors import ConfigError, StoreError

TIMEOUT_S = 2.0


class RedisClient:
    """A client and what names it in messages.

    raw     the client; connections are made on use and again after a loss
    url     without user and password
    prefix  of all keys; its hash tag keeps them on one node of a Redis Cluster
    """

    def __init__(self, url: str, name: str, timeout: float) -> None:
        """`timeout` is in seconds, for each round trip. Raises `ConfigError` for a bad URL."""
        parts = urlsplit(url)
        try:
            self.raw = redis.Redis.from_url(
                url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # The callers try again themselves; a loss must show within one timeout.
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as error:
            raise ConfigError("store", f"not a Redis URL ({error})") from error
        self.url = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
        self.prefix = f"{{draftline:{name}}}"
        self.manifest = f"{self.prefix}:manifest"
        self.channel = f"{self.prefix}:changes"

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Raises `StoreError` for what Redis raises."""
        try:
            yield
        except redis.RedisError as error:
            raise StoreError(f"{self.url}: Redis does not answer ({error})") from error


def as_text(value: bytes | str) -> str:
    """What Redis answered, as text."""
    return value.decode() if isinstance(value, bytes) else value
