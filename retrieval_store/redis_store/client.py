"""A Redis client with the names of a store's keys, at the cluster node that holds them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import MovedError

from ...core.errors import StoreError
from .connection import connect, reported, shown_url

TIMEOUT_S = 2.0


class RedisClient:
    """A client and what names it in messages.

    raw     the client; see `connect`. Within `reported` it talks to the node that holds the keys,
            whichever node of a Redis Cluster the URL names
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
        self._named = self.raw.connection_pool
        self._finding = threading.Lock()
        self._is_found = False

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Raises `StoreError` for what Redis raises."""
        try:
            with reported(self.url):
                self._find_node()
                yield
        except StoreError:
            # The keys may have moved, or their node may be down and another have taken over.
            with self._finding:
                self._is_found = False
            raise

    def _find_node(self) -> None:
        """Ask for a key, of any name: all of a store are at one node, and others name it."""
        with self._finding:
            if self._is_found:
                return
            self.raw.connection_pool = self._named
            try:
                self.raw.get(f"{self.prefix}:node")
            except MovedError as moved:
                named = self._named
                settings = {**named.connection_kwargs, "host": moved.host, "port": moved.port}
                self.raw.connection_pool = redis.ConnectionPool(named.connection_class, **settings)
            self._is_found = True


def as_text(value: bytes | str) -> str:
    """What Redis answered, as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
