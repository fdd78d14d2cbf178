"""Repeats an object's action in a background thread, until it is stopped or garbage-collected."""

from __future__ import annotations

import logging
import random
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from ...core.errors import StoreError

logger = logging.getLogger(__name__)

# Longest wait after failures.
MAX_RETRY_SECONDS = 5.0

T = TypeVar("T")


def start_repeating(
    owner: T,
    action: Callable[[T], None],
    *,
    name: str,
    stopped: threading.Event,
    first_retry: float,
) -> threading.Thread:
    """A daemon thread that calls `action` with `owner`; it keeps a reference only during the call.

    name         of the thread, and in the log
    stopped      ends it
    first_retry  seconds; the pause after a failure is at most twice that, and doubles with each
    """
    arguments = (weakref.ref(owner), action, name, stopped, first_retry)
    thread = threading.Thread(target=_repeat, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def _repeat(
    owner: Callable[[], T | None],
    action: Callable[[T], None],
    name: str,
    stopped: threading.Event,
    first_retry: float,
) -> None:
    failures = 0
    while not stopped.is_set() and (held := owner()) is not None:
        try:
            action(held)
            if failures:
                logger.info("event=%s_back", name)
            failures = 0
        except Exception as error:
            # Any failure is retried; consecutive failures are logged once.
            level = logging.DEBUG if failures else logging.WARNING
            expected = isinstance(error, StoreError)
            logger.log(level, "event=%s_failed %s", name, error, exc_info=not expected)
            failures += 1
        del held
        if failures:
            # Full jitter, so that replicas do not come back all at once.
            ceiling = min(MAX_RETRY_SECONDS, first_retry * 2 ** min(failures, 8))
            stopped.wait(random.uniform(0.0, ceiling))
