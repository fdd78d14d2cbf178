"""A delta log in Redis: one stream for each namespace, beside the segments of `redis_store`.

Keys, with the segment store's hash tag; `tag` is the fitness of the texts:

    ...:delta:<namespace>:<tag>   stream of `digest`, `weight` and, of new texts, `tokens`
    ...:folded:<namespace>:<tag>  string: `Folded` as JSON
    ...:epochs                    hash: "<namespace>/<tag>" -> epoch
    ...:lock:<namespace>          held while the namespace is folded or forgotten
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from redis.client import Pipeline
from redis.exceptions import LockError
from redis.lock import Lock

from ..core.errors import StoreError
from .delta_log import DeltaEvent, Folded, LoggedEvent
from .fitness import Fitness
from .learning_settings import LearningSettings
from .redis_client import TIMEOUT_S, RedisClient, as_text
from .store import check_namespace

# A fold takes seconds; whoever dies in one keeps the others out for so long.
LOCK_SECONDS = 120.0


class RedisDeltaLog:
    """Implements `DeltaLog` over the URL and name of a `RedisStore`."""

    def __init__(
        self,
        url: str,
        fitness: Fitness,
        settings: LearningSettings,
        *,
        name: str = "retrieval",
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._redis = RedisClient(url, name, timeout)
        self._client = self._redis.raw
        self._tag = fitness.tag
        self._settings = settings
        self._epochs = f"{self._redis.prefix}:epochs"
        self._locks: dict[str, Lock] = {}

    def append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        """One transaction: the events, the log's bounds, and the message to readers.

        It is tried again when the policy changes meanwhile, and begins with a look at it.
        """
        check_namespace(namespace)
        is_off = False

        def add(change: Pipeline) -> None:
            nonlocal is_off
            is_off = change.hexists(self._redis.learning, namespace)
            if not is_off:
                change.multi()
                self._add(change, namespace, events)

        with self._redis.reported():
            self._client.transaction(add, self._redis.learning)
        return not is_off

    def _add(self, change: Pipeline, namespace: str, events: Sequence[DeltaEvent]) -> None:
        settings, key = self._settings, self._key("delta", namespace)
        oldest = int(1e3 * (time.time() - settings.log_seconds))
        for event in events:
            change.xadd(key, _fields(event), maxlen=settings.log_entries, approximate=True)
        change.xtrim(key, minid=oldest, approximate=True)
        change.expire(key, int(settings.log_seconds) + 1)
        change.hsetnx(self._epochs, f"{namespace}/{self._tag}", secrets.token_hex(8))
        change.publish(self._redis.channel, namespace)

    def epochs(self) -> dict[str, str]:
        """Of the namespaces that have texts of this fitness."""
        with self._redis.reported():
            found = self._client.hgetall(self._epochs)
        split = {as_text(key).partition("/"): as_text(epoch) for key, epoch in found.items()}
        return {
            namespace: epoch for (namespace, _, tag), epoch in split.items() if tag == self._tag
        }

    def read(self, namespace: str, after: str = "") -> list[LoggedEvent]:
        """In one round trip; entries that are no events are left out."""
        with self._redis.reported():
            entries: Any = self._client.xrange(
                self._key("delta", namespace), min=f"({after}" if after else "-"
            )
        found = [(as_text(position), _event(fields)) for position, fields in entries]
        return [
            LoggedEvent(position, int(position.partition("-")[0]) / 1e3, event)
            for position, event in found
            if event is not None
        ]

    def folded(self, namespace: str) -> Folded:
        """What the last fold said."""
        key = self._key("folded", namespace)
        with self._redis.reported():
            text = self._client.get(key)
        if text is None:
            return Folded()
        assert isinstance(text, bytes), "the client must not decode answers"
        return Folded.from_json(text, f"{self._redis.url} {key}")

    def fold(self, namespace: str, folded: Folded, up_to: str = "") -> None:
        """One transaction."""
        key = self._key("delta", namespace)
        with self._redis.reported():
            lock = self._locks.get(namespace)
            if lock is None or not lock.owned():
                raise StoreError(f"{self._redis.url}: lost the lock on namespace {namespace}")
            with self._client.pipeline(transaction=True) as change:
                change.set(self._key("folded", namespace), folded.to_json())
                if up_to:
                    change.xtrim(key, minid=_next(up_to), approximate=False)
                change.hset(self._epochs, f"{namespace}/{self._tag}", secrets.token_hex(8))
                change.publish(self._redis.channel, namespace)
                change.execute()

    @contextmanager
    def locked(self, namespace: str) -> Iterator[bool]:
        """Without waiting."""
        lock = namespace_lock(self._redis, namespace)
        with self._redis.reported():
            if not lock.acquire(blocking=False):
                yield False
                return
        self._locks[namespace] = lock
        try:
            yield True
        finally:
            del self._locks[namespace]
            release(self._redis, lock)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _key(self, kind: str, namespace: str) -> str:
        return f"{self._redis.prefix}:{kind}:{namespace}:{self._tag}"


def namespace_lock(client: RedisClient, namespace: str) -> Lock:
    """The lock under which a namespace is folded or forgotten; not taken yet."""
    return client.raw.lock(f"{client.prefix}:lock:{namespace}", timeout=LOCK_SECONDS)


def release(client: RedisClient, lock: Lock) -> None:
    """Give a lock back. Raises `StoreError`; one that expired meanwhile is left to its owner."""
    try:
        with client.reported():
            lock.release()
    except StoreError as error:
        if not isinstance(error.__cause__, LockError):
            raise


def _fields(event: DeltaEvent) -> dict[Any, Any]:
    fields = {"digest": event.digest, "weight": repr(event.weight)}
    if event.tokens is None:
        return fields
    return fields | {"tokens": event.tokens.astype("<i4").tobytes()}


def _event(fields: dict[bytes, bytes]) -> DeltaEvent | None:
    tokens = fields.get(b"tokens")
    try:
        array = None if tokens is None else np.frombuffer(tokens, "<i4").astype(np.int32)
        return DeltaEvent(fields[b"digest"].decode(), float(fields[b"weight"]), array)
    except (KeyError, ValueError):
        return None


def _next(position: str) -> str:
    """The lowest position above one."""
    milliseconds, _, count = position.partition("-")
    return f"{milliseconds}-{int(count) + 1}"
