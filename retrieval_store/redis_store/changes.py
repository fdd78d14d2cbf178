"""Notifications of changes over Redis pub/sub, with a plain wait as the fallback."""

from __future__ import annotations

import logging
import threading
import time

import redis
from redis.client import PubSub

logger = logging.getLogger(__name__)

# Seconds after which a subscription is renewed, since a connection may die silently.
SUBSCRIPTION_SECONDS = 60.0


class ChangeListener:
    """Waits for messages on a channel; one thread at a time.

    Without a subscription (connection lost, or no right to subscribe) it only waits, and the caller
    relies on polling. Each wait tries to subscribe again.
    """

    def __init__(self, client: redis.Redis, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._pubsub: PubSub | None = None
        self._subscribed_at = 0.0
        self._is_told = True
        self._closed = threading.Event()

    def wait(self, timeout: float) -> None:
        """Return after a notification or a new subscription, at the latest after `timeout`
        seconds."""
        end = time.monotonic() + timeout
        try:
            pubsub = self._subscribed()
            if pubsub.get_message(timeout=timeout) is not None:
                # One refresh covers all notifications so far.
                while pubsub.get_message(timeout=0.0) is not None:
                    pass
            self._is_told = True
        except redis.RedisError as error:
            self._forget()
            if self._is_told:
                logger.info("event=retrieval_store_polled %s", error)
            self._is_told = False
            self._closed.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End the subscription, and a wait without one."""
        self._closed.set()
        self._forget()

    def _subscribed(self) -> PubSub:
        if time.monotonic() > self._subscribed_at + SUBSCRIPTION_SECONDS:
            self._forget()
        if self._pubsub is None:
            self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
            self._pubsub.subscribe(self._channel)
            self._subscribed_at = time.monotonic()
        return self._pubsub

    def _forget(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            pubsub.close()
