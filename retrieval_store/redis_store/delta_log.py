"""A delta log in Redis, one stream for each namespace, with the learning policy and erasure.

Keys, with the segment store's hash tag; `tag` is the fingerprint of the texts:

    ...:delta:<namespace>:<tag>   stream of `digest`, `weight` and, of new texts, `tokens`
    ...:folded:<namespace>:<tag>  string: `Folded` as JSON
    ...:epochs                    hash: "<namespace>/<tag>" -> epoch
    ...:lock:<namespace>          held while the namespace is folded or forgotten
    ...:learning                  hash: namespace -> "off"
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.client import Pipeline
from redis.exceptions import LockError, NoPermissionError
from redis.lock import Lock

from ...core.errors import DamagedError, StoreError
from ..delta.damage import DamageCount
from ..delta.delta_log import DeltaEvent, Folded, LoggedEvent, StoreClock, checked_event
from ..delta.settings import LearningSettings, Tagged
from ..learning import check_learned
from ..store import NAMESPACE, check_namespace
from .client import TIMEOUT_S, RedisClient, as_text

OFF = "off"
logger = logging.getLogger(__name__)
# Entries of one round trip; Redis keeps about a hundred more entries than the given limit.
PAGE = 1024
# A fold takes seconds; a process that dies in one blocks the others for this long.
LOCK_SECONDS = 120.0
# Keys of these kinds have a namespace after the kind. The lock has one, too, but holds no data and
# expires; a folder may take it at any time.
KINDS = frozenset({"chunk", "delta", "folded"})
# Seconds to wait for a running fold.
LOCK_WAIT_S = 30.0


class RedisLearningPolicy:
    """Implements `LearningPolicy` over the URL and name of a `RedisStore`."""

    def __init__(self, url: str, name: str = "retrieval", timeout: float = TIMEOUT_S) -> None:
        self._redis = RedisClient(url, name, timeout)
        self._client = self._redis.raw

    def off(self) -> frozenset[str]:
        """Namespaces excluded from learning; one round trip."""
        with self._redis.reported():
            return frozenset(as_text(name) for name in self._client.hgetall(self._redis.learning))

    def switch(self, namespace: str, *, learns: bool) -> None:
        """Forbid or allow learning of a namespace, in one command.

        Every running append reads the policy again.
        """
        check_learned(namespace)
        with self._redis.reported():
            if learns:
                self._client.hdel(self._redis.learning, namespace)
            else:
                self._client.hset(self._redis.learning, namespace, OFF)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class RedisDeltaLog:
    """Implements `DeltaLog` over the URL and name of a `RedisStore`.

    Times come from the server. Without the right to run `TIME`, this process's clock decides which
    texts are old when they are read or folded. In that case nothing is trimmed for its age.
    """

    def __init__(
        self,
        url: str,
        fingerprint: Tagged,
        settings: LearningSettings,
        *,
        name: str = "retrieval",
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.damage = DamageCount()
        self._redis = RedisClient(url, name, timeout)
        self._client = self._redis.raw
        self._clock = StoreClock(self._server_time)
        self._may_ask_time = True
        self._tag = fingerprint.tag
        self._settings = settings
        self._epochs = f"{self._redis.prefix}:epochs"
        self._locks: dict[str, Lock] = {}

    def now(self) -> float:
        """Seconds since the epoch, by the server's clock."""
        return self._clock.now()

    def append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        """One transaction: the events, the log's bounds, and the message to readers.

        It first reads the policy, and retries if the policy changes meanwhile. A key of another
        type in the stream's place is deleted.
        """
        check_namespace(namespace)
        try:
            return self._append(namespace, events)
        except DamagedError:
            if not self._discard_other(namespace):
                raise
        return self._append(namespace, events)

    def _append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        is_off, now = False, self.now()

        def add(change: Pipeline) -> None:
            nonlocal is_off
            is_off = change.hexists(self._redis.learning, namespace)
            if not is_off:
                change.multi()
                self._add(change, namespace, events, now)

        with self._redis.reported():
            self._client.transaction(add, self._redis.learning)
        return not is_off

    def _add(
        self, change: Pipeline, namespace: str, events: Sequence[DeltaEvent], now: float
    ) -> None:
        settings, key = self._settings, self._key("delta", namespace)
        for event in events:
            change.xadd(key, _fields(event), maxlen=settings.log_entries, approximate=True)
        if self._may_ask_time:
            oldest = max(0, int(1e3 * (now - settings.log_seconds)))
            change.xtrim(key, minid=oldest, approximate=True)
        change.expire(key, int(settings.log_seconds) + 1)
        change.hsetnx(self._epochs, f"{namespace}/{self._tag}", secrets.token_hex(8))
        change.publish(self._redis.channel, namespace)

    def _discard_other(self, namespace: str) -> bool:
        """Delete a key of another type in the place of a namespace's stream; whether there was
        one."""
        key = self._key("delta", namespace)
        try:
            with self._redis.reported():
                self._client.xrange(key, count=1)
        except DamagedError:
            self.damage.add(namespace, "log")
            with self._redis.reported():
                self._client.unlink(key)
            return True
        return False

    def epochs(self) -> dict[str, str]:
        """Epochs of the namespaces that have texts for this model."""
        with self._redis.reported():
            fields = self._client.hgetall(self._epochs)
        split = {as_text(key).partition("/"): as_text(epoch) for key, epoch in fields.items()}
        return {
            namespace: epoch
            for (namespace, _, tag), epoch in split.items()
            if tag == self._tag and NAMESPACE.fullmatch(namespace)
        }

    def read(self, namespace: str, after: str = "") -> list[LoggedEvent]:
        """Events after the position `after`, oldest first.

        Invalid entries are skipped; entries far beyond the log's bound are left to the next read.
        """
        events: list[LoggedEvent] = []
        most = self._settings.log_entries + PAGE
        is_more = True
        while is_more and len(events) < most:
            with self._redis.reported():
                entries: Any = self._client.xrange(
                    self._key("delta", namespace), min=f"({after}" if after else "-", count=PAGE
                )
            for name, fields in entries:
                after = as_text(name)
                self._take(namespace, after, fields, events)
            is_more = len(entries) == PAGE
        return events

    def _take(self, namespace: str, position: str, fields: Any, events: list[LoggedEvent]) -> None:
        try:
            event = _event(fields)
        except (KeyError, ValueError, TypeError):
            self.damage.add(namespace, position)
        else:
            events.append(LoggedEvent(position, int(position.partition("-")[0]) / 1e3, event))

    def folded(self, namespace: str) -> Folded:
        """The record of the last fold; an empty one if there was none, or it is damaged."""
        key = self._key("folded", namespace)
        try:
            with self._redis.reported():
                text = self._client.get(key)
            if text is None:
                return Folded()
            assert isinstance(text, bytes), "the client must not decode answers"
            return Folded.from_json(text, f"{self._redis.url} {key}")
        except DamagedError:
            self.damage.add(namespace, "folded")
            return Folded()

    def fold(self, namespace: str, folded: Folded, up_to: str = "") -> None:
        """Set `folded` and drop events up to position `up_to`, in one transaction.

        Raises `StoreError` if the namespace's lock was lost.
        """
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
        """Try to lock the namespace against other folds and erasures, without waiting; whether it
        succeeded."""
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

    def _server_time(self) -> float:
        with self._redis.reported():
            try:
                seconds, microseconds = self._client.time()
            except NoPermissionError:
                if self._may_ask_time:
                    logger.warning("event=own_clock_used store=%s; allow +time", self._redis.url)
                self._may_ask_time = False
                return time.time()
        self._may_ask_time = True
        return seconds + microseconds / 1e6

    def _key(self, kind: str, namespace: str) -> str:
        return f"{self._redis.prefix}:{kind}:{namespace}:{self._tag}"


def redis_log_tags(url: str, name: str = "retrieval", timeout: float = TIMEOUT_S) -> list[str]:
    """Tags of the logs in Redis, sorted. Raises `StoreError`."""
    client = RedisClient(url, name, timeout)
    try:
        with client.reported():
            epochs = client.raw.hgetall(f"{client.prefix}:epochs")
    finally:
        client.raw.close()
    return sorted({as_text(key).rpartition("/")[2] for key in epochs})


def namespace_lock(client: RedisClient, namespace: str) -> Lock:
    """The lock under which a namespace is folded or forgotten; not taken yet."""
    return client.raw.lock(f"{client.prefix}:lock:{namespace}", timeout=LOCK_SECONDS)


def release(client: RedisClient, lock: Lock) -> None:
    """Release a lock. Raises `StoreError`; an expired lock is left to its new owner."""
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


def _event(fields: dict[bytes, bytes]) -> DeltaEvent:
    """An event from the fields of a stream's entry.

    Raises `ValueError` or `KeyError` for anything but what `_fields` gave.
    """
    weight = float(fields[b"weight"])
    return checked_event(fields[b"digest"].decode(), weight, fields.get(b"tokens"))


def _next(position: str) -> str:
    """The lowest position above one."""
    milliseconds, _, count = position.partition("-")
    return f"{milliseconds}-{int(count) + 1}"


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
