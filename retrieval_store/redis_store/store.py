"""A store in Redis, shared by all replicas of a cluster.

Keys, all with the hash tag `{draftline:<name>}` so that a Redis Cluster keeps them on one node:

    ...:manifest                    hash: "format" -> FORMAT_VERSION, "<namespace>/<id>" -> bytes;
                                    "origin" where learning alone began the store
    ...:chunk:<namespace>:<id>:<i>  SHA-256 and at most CHUNK_BYTES of the segment
    ...:changes                     channel notified after every change

What is learned lies beside them, see `retrieval_store/redis_store/delta_log.py`.

A segment's chunks are written first, with an expiry in case the writer dies. One transaction then
removes the expiry, changes the manifest and notifies the channel. It is refused unless every chunk
exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import redis
from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError

from ...core.errors import DamagedError, StoreError
from ..segment.packed_file import DIGEST_BYTES, Data, seal, unseal
from ..segment.segment import Segment
from ..store import (
    Manifest,
    SegmentStore,
    check_names,
    check_namespace,
    damaged_manifest,
    is_entry,
    require_id,
)
from .client import TIMEOUT_S, ChangeListener, RedisClient, as_text, require_room, warn_of_eviction

# With the digest and Redis's header, a chunk fits a block of 4 MiB, which the allocator does not
# round up.
CHUNK_BYTES = 4 * 2**20 - 4096
# Terabytes.
MAX_SIZE_DIGITS = 13
UPLOAD_SECONDS = 3600
# Seconds that deleted chunks stay for readers with an older manifest.
GRACE_SECONDS = 60
FORMAT = b"format"
ORIGIN = b"origin"
FORMAT_VERSION = b"2"


class RedisStore(SegmentStore):
    """Implements `SegmentStore` over Redis; see `connect` for the URL.

    Connections are made on use and again after a loss; `timeout` is in seconds and holds for each
    round trip. One thread may wait for changes while others use the store. A reader needs the
    commands hgetall and get; without subscribe it polls. A writer also needs watch, multi, exec,
    hget, hexists, strlen, exists, set, unlink, persist, expire, hset, hdel and publish. Without
    info it detects a full Redis only by refused writes.
    """

    def __init__(self, url: str, name: str = "retrieval", timeout: float = TIMEOUT_S) -> None:
        self._redis = RedisClient(url, name, timeout)
        self._client = self._redis.raw
        self._prefix = self._redis.prefix
        self._manifest = self._redis.manifest
        self._channel = self._redis.channel
        self._listener = ChangeListener(self._client, self._channel)

    @property
    def url(self) -> str:
        """The URL without user, password and query."""
        return self._redis.url

    def manifest(self) -> Manifest:
        """The segments stored now; one round trip."""
        with self._redis.reported():
            entries = self._client.hgetall(self._manifest)
        self._check_format(entries.get(FORMAT))
        sizes: dict[str, dict[str, int]] = {}
        damaged: dict[str, DamagedError] = {}
        for key, value in entries.items():
            if key in (FORMAT, ORIGIN):
                continue
            name, text = as_text(key), as_text(value)
            namespace, _, segment_id = name.partition("/")
            size = _size(text)
            if not is_entry(namespace, segment_id, size):
                damaged[name] = damaged_manifest(self.url, name)
            elif size is not None:
                sizes.setdefault(namespace, {})[segment_id] = size
        return Manifest(
            sizes,
            written=FORMAT in entries,
            origin=as_text(entries.get(ORIGIN, b"")),
            damaged=damaged,
        )

    def get(self, namespace: str, segment_id: str) -> Segment:
        """The segment, joined from its chunks, each and the whole checked."""
        check_names(namespace, segment_id)
        origin = f"{self.url} {namespace}/{segment_id}"
        # The segment's arrays are views of these bytes, so they are held only once.
        data, index, size = bytearray(), 0, CHUNK_BYTES
        # The last chunk is the only short one; it is empty where the size fits exactly.
        while size == CHUNK_BYTES:
            with self._redis.reported():
                chunk = self._client.get(self._chunk(namespace, segment_id, index))
            if chunk is None:
                raise DamagedError(f"{origin}: not stored, or incomplete; build the corpus again")
            assert isinstance(chunk, bytes), "the client must not decode answers"
            payload = unseal(chunk, f"{origin}: chunk {index}")
            data += payload
            index, size = index + 1, len(payload)
        segment = Segment.from_data(memoryview(data).toreadonly(), origin)
        require_id(segment, segment_id, origin)
        return segment

    def change(
        self,
        namespace: str,
        *,
        add: Sequence[Segment] = (),
        remove: Sequence[str] = (),
        follows: Manifest | None = None,
    ) -> list[str]:
        """Upload what is added, then switch the manifest in one transaction."""
        check_namespace(namespace)
        for segment_id in remove:
            check_names(namespace, segment_id)
        added = {segment.segment_id: segment.data for segment in add}
        with self._redis.reported():
            self._check_format(self._client.hget(self._manifest, FORMAT.decode()))
            self._origin_after(self._client, follows)
            if added:
                warn_of_eviction(self._client, self.url)
                missing = sum(self._missing(namespace, *item) for item in added.items())
                # While a chunk is written, Redis also holds the message that contains it.
                require_room(self._client, missing + min(missing, CHUNK_BYTES), self.url)
            try:
                for segment_id, data in added.items():
                    self._upload(namespace, segment_id, data)
            except (StoreError, OutOfMemoryError):
                # Redis is full: unlisted chunks must not occupy it until they expire.
                self._discard(namespace, added)
                raise
            removed = [name for name in remove if name not in added]
            self._switch(namespace, added, removed, follows)
        return list(added)

    def accept_loss(self) -> None:
        """Let what is stored now be all that the store holds; one transaction."""
        with self._redis.reported():
            self._check_format(self._client.hget(self._manifest, FORMAT.decode()))
            with self._client.pipeline(transaction=True) as change:
                change.hset(self._manifest, FORMAT.decode(), FORMAT_VERSION)
                change.hdel(self._manifest, ORIGIN.decode())
                change.publish(self._channel, "")
                change.execute()

    def wait_for_change(self, timeout: float) -> None:
        """Return after a notification on the channel, at the latest after `timeout` seconds."""
        self._listener.wait(timeout)

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()
        self._client.close()

    def _chunk(self, namespace: str, segment_id: str, index: int) -> str:
        return f"{self._prefix}:chunk:{namespace}:{segment_id}:{index}"

    def _chunks(self, namespace: str, segment_id: str, size: int) -> list[str]:
        return [
            self._chunk(namespace, segment_id, index) for index in range(size // CHUNK_BYTES + 1)
        ]

    def _missing(self, namespace: str, segment_id: str, data: Data) -> int:
        """Additional bytes that Redis needs for this segment; existing chunks are replaced."""
        keys = self._chunks(namespace, segment_id, len(data))
        with self._client.pipeline(transaction=False) as asked:
            for key in keys:
                asked.strlen(key)
            held = asked.execute()
        return max(0, len(data) + DIGEST_BYTES * len(keys) - sum(held))

    def _upload(self, namespace: str, segment_id: str, data: Data) -> None:
        entry = f"{namespace}/{segment_id}"
        keys = self._chunks(namespace, segment_id, len(data))
        for key, payload in zip(keys, _payloads(data), strict=True):
            chunk = seal(payload)
            room = 2 * len(chunk) - self._client.strlen(key)
            require_room(self._client, room, self.url)

            # Chunks of a listed segment must never expire, also if another writer lists it just
            # while this one uploads the same.
            def write(change: Pipeline, key: str = key, chunk: bytes = chunk) -> None:
                listed = change.hexists(self._manifest, entry)
                change.multi()
                if listed:
                    change.set(key, chunk, keepttl=True)
                else:
                    change.set(key, chunk, ex=UPLOAD_SECONDS)

            self._client.transaction(write, self._manifest)

    def _discard(self, namespace: str, added: Mapping[str, Data]) -> None:
        def unlink(change: Pipeline) -> None:
            listed = {
                name for name in added if change.hexists(self._manifest, f"{namespace}/{name}")
            }
            change.multi()
            for name, data in added.items():
                if name not in listed:
                    change.unlink(*self._chunks(namespace, name, len(data)))

        self._client.transaction(unlink, self._manifest)

    def _origin_after(self, client: redis.Redis, follows: Manifest | None) -> str:
        """The `origin` of the manifest after a change, see `Manifest.origin_after`."""
        if follows is None:
            return ""
        written = client.hexists(self._manifest, FORMAT.decode())
        origin = client.hget(self._manifest, ORIGIN.decode()) or b""
        now = Manifest(written=bool(written), origin=as_text(origin))
        return now.origin_after(follows, self.url)

    def _switch(
        self,
        namespace: str,
        added: Mapping[str, Data],
        removed: Sequence[str],
        follows: Manifest | None,
    ) -> None:
        sizes = {f"{namespace}/{name}": len(data) for name, data in added.items()}
        keys = [
            key for name, data in added.items() for key in self._chunks(namespace, name, len(data))
        ]

        def switch(change: Pipeline) -> None:
            # A restart, an eviction or an expiry may have taken chunks since they were written.
            if keys and change.exists(*keys) != len(keys):
                raise StoreError(f"{self.url}: Redis lost parts of this upload; try again")
            origin = self._origin_after(change, follows)
            gone = {name: change.hget(self._manifest, f"{namespace}/{name}") for name in removed}
            change.multi()
            for key in keys:
                change.persist(key)
            if sizes:
                self._list(change, sizes, origin)
            for name, size in gone.items():
                if size is not None:
                    self._expire(change, namespace, name, _size(as_text(size)) or 0)
            if sizes or any(size is not None for size in gone.values()):
                change.publish(self._channel, namespace)

        # The chunks are watched, too: none may go between the check and the switch.
        self._client.transaction(switch, self._manifest, *keys)

    def _list(self, change: Pipeline, sizes: Mapping[str, int], origin: str) -> None:
        named = {ORIGIN.decode(): origin} if origin else {}
        change.hset(self._manifest, mapping={FORMAT.decode(): FORMAT_VERSION, **named, **sizes})
        if not origin:
            change.hdel(self._manifest, ORIGIN.decode())

    def _expire(self, change: Pipeline, namespace: str, segment_id: str, size: int) -> None:
        change.hdel(self._manifest, f"{namespace}/{segment_id}")
        for key in self._chunks(namespace, segment_id, size):
            change.expire(key, GRACE_SECONDS)

    def _check_format(self, version: bytes | str | None) -> None:
        if version is not None and version != FORMAT_VERSION:
            raise StoreError(
                f"{self.url}: format {as_text(version)}, this draftline reads "
                f"{as_text(FORMAT_VERSION)}; "
                f"delete the keys {self._prefix}:* and build the corpora again"
            )


def _size(text: str) -> int | None:
    """Bytes of a segment by its text in the manifest; None for an invalid size."""
    is_size = text.isascii() and text.isdecimal() and len(text) <= MAX_SIZE_DIGITS
    return int(text) if is_size else None


def _payloads(data: Data) -> Iterator[bytes]:
    for start in range(0, len(data) + 1, CHUNK_BYTES):
        yield bytes(data[start : start + CHUNK_BYTES])
