"""The learning policy in Redis: a hash beside the manifest.

...:learning  hash: namespace -> "off"; with the hash tag of the segment store
"""

from __future__ import annotations

from ..learning.erasure import check_learned
from .client import TIMEOUT_S, RedisClient, as_text

OFF = "off"


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
