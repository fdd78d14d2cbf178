"""A store in Redis, shared by all replicas of a cluster.

Keys, all with the hash tag `{draftline:<name>}` so that a Redis Cluster keeps them on one node:

    ...:manifest                    hash: "format" -> "1", "<namespace>/<id>" -> bytes
    ...:chunk:<namespace>:<id>:<i>  string of at most CHUNK_BYTES
    ...:changes                     channel told after every change

What is learned lies beside them, see `redis_delta_log`.

A segment's chunks are written first, to expire if the writer dies; one transaction then makes
them last, adds the manifest entry and tells the channel.
"""

from __future__ import annotations

from redis.client import PubSub

from ..core.errors import StoreError
from .redis_client import TIMEOUT_S, RedisClient, as_text
from .segment import Segment
from .store import Manifest, check_names, check_namespace

CHUNK_BYTES = 4 * 2**20
UPLOAD_SECONDS = 3600
# Deleted chunks stay so long for readers that hold an older manifest.
GRACE_SECONDS = 60
FORMAT = "format"


class RedisStore:
    """Implements `SegmentStore` over `redis://[user:password@]host:port/db`.

    Connections are made on use and again after a loss; `timeout` is in seconds and holds for each
    round trip. One thread may wait for changes while others use the store.
    """

    def __init__(self, url: str, name: str = "retrieval", timeout: float = TIMEOUT_S) -> None:
        self._redis = RedisClient(url, name, timeout)
        self._client = self._redis.raw
        self._prefix = self._redis.prefix
        self._manifest = self._redis.manifest
        self._channel = self._redis.channel
        self._listener: PubSub | None = None

    @property
    def url(self) -> str:
        """The URL without user and password."""
        return self._redis.url

    def manifest(self) -> Manifest:
        """What is stored now, in one round trip."""
        with self._redis.reported():
            entries = self._client.hgetall(self._manifest)
        sizes: dict[str, dict[str, int]] = {}
        for key, value in entries.items():
            namespace, slash, segment_id = as_text(key).partition("/")
            if slash and as_text(value).isdecimal():
                sizes.setdefault(namespace, {})[segment_id] = int(value)
        return Manifest(sizes, written=FORMAT.encode() in entries)

    def get(self, namespace: str, segment_id: str) -> Segment:
        """The segment, joined from its chunks and checked."""
        check_names(namespace, segment_id)
        origin = f"{self.url} {namespace}/{segment_id}"
        chunks: list[bytes] = []
        with self._redis.reported():
            # The last chunk is the only short one; it is empty where the size fits exactly.
            while not chunks or len(chunks[-1]) == CHUNK_BYTES:
                chunk = self._client.get(self._chunk(namespace, segment_id, len(chunks)))
                if chunk is None:
                    raise StoreError(f"{origin}: not stored, or incomplete; build the corpus again")
                assert isinstance(chunk, bytes), "the client must not decode answers"
                chunks.append(chunk)
        return Segment.from_data(b"".join(chunks), origin)

    def put(self, namespace: str, segment: Segment) -> str:
        """Upload the chunks, then list the segment."""
        check_namespace(namespace)
        segment_id, data = segment.segment_id, segment.data
        entry = f"{namespace}/{segment_id}"
        keys = []
        with self._redis.reported():
            # Chunks of a listed segment must never expire, whatever happens to this upload.
            listed = self._client.hexists(self._manifest, entry)
            for start in range(0, len(data) + 1, CHUNK_BYTES):
                keys.append(self._chunk(namespace, segment_id, len(keys)))
                chunk = data[start : start + CHUNK_BYTES]
                self._client.set(keys[-1], chunk, ex=None if listed else UPLOAD_SECONDS)
            with self._client.pipeline(transaction=True) as change:
                for key in keys:
                    change.persist(key)
                change.hset(self._manifest, mapping={FORMAT: "1", entry: len(data)})
                change.publish(self._channel, segment_id)
                change.execute()
        return segment_id

    def delete(self, namespace: str, segment_id: str) -> None:
        """Take the segment out of the manifest; its chunks expire."""
        check_names(namespace, segment_id)
        entry = f"{namespace}/{segment_id}"
        with self._redis.reported():
            size = self._client.hget(self._manifest, entry)
            if size is None:
                return
            with self._client.pipeline(transaction=True) as change:
                change.hdel(self._manifest, entry)
                for index in range(int(size) // CHUNK_BYTES + 1):
                    change.expire(self._chunk(namespace, segment_id, index), GRACE_SECONDS)
                change.publish(self._channel, segment_id)
                change.execute()

    def wait_for_change(self, timeout: float) -> None:
        """Return when the channel tells of a change, at the latest after `timeout` seconds."""
        try:
            with self._redis.reported():
                if self._listener is None:
                    self._listener = self._client.pubsub(ignore_subscribe_messages=True)
                    self._listener.subscribe(self._channel)
                self._listener.get_message(timeout=timeout)
                # One reading answers all that was told so far.
                while self._listener.get_message(timeout=0.0) is not None:
                    pass
        except StoreError:
            self._forget_listener()
            raise

    def close(self) -> None:
        """Close all connections."""
        self._forget_listener()
        self._client.close()

    def _chunk(self, namespace: str, segment_id: str, index: int) -> str:
        return f"{self._prefix}:chunk:{namespace}:{segment_id}:{index}"

    def _forget_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
