"""Tenants in Redis: a hash of them, a counter of changes, and a stream as audit log."""

from __future__ import annotations

import json
from collections.abc import Sequence

import redis

from ...core.errors import StoreError
from ...retrieval_store.redis_store.client import as_text, connect, reported, shown_url
from .store import Change, Record

# One hash tag: they change together, also in a Redis Cluster.
TENANTS = "{draftline:tenants}"
VERSION = f"{TENANTS}:version"
AUDIT = f"{TENANTS}:audit"
# How long one command may take.
TIMEOUT_S = 2.0
# Changes of others that may come between reading and writing.
MAX_TRIES = 20


class RedisTenants:
    """The tenants of one Redis database."""

    def __init__(self, url: str) -> None:
        """Connects on use. Raises `ConfigError` for a malformed URL."""
        self._client = connect(url, TIMEOUT_S)
        self._where = shown_url(url)

    @property
    def where(self) -> str:
        """The address, without a password."""
        return self._where

    def version(self) -> object:
        """The number of changes. Raises `StoreError`."""
        with reported(self._where):
            return self._client.get(VERSION)

    def read(self) -> Sequence[Record]:
        """All records, by name. Raises `StoreError`."""
        with reported(self._where):
            return self._records(self._client.hgetall(TENANTS))

    def change(self, change: Change) -> None:
        """Apply a change and note it. Raises `StoreError` and what `change` raises."""
        with reported(self._where), self._client.pipeline() as pipe:
            for _ in range(MAX_TRIES):
                pipe.watch(VERSION, TENANTS)
                before = self._records(pipe.hgetall(TENANTS))
                after, entry = change(before)
                pipe.multi()
                pipe.delete(TENANTS)
                for record in after:
                    pipe.hset(TENANTS, str(record["name"]), json.dumps(dict(record)))
                pipe.incr(VERSION)
                pipe.xadd(AUDIT, {"entry": entry})
                try:
                    pipe.execute()
                except redis.WatchError:
                    continue
                return
        raise StoreError(f"{self._where}: others change the tenants all the time; try again")

    def _records(self, found: object) -> Sequence[Record]:
        fields: dict[bytes | str, bytes | str] = found  # pyright: ignore[reportAssignmentType]
        records = []
        for name in sorted(map(as_text, fields)):
            text = as_text(fields.get(name.encode(), fields.get(name, b"")))
            try:
                records.append(json.loads(text))
            except json.JSONDecodeError as error:
                raise StoreError(f"{self._where}: tenant {name!r} is no JSON") from error
        return records
