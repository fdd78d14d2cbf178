"""What services do in the background ends with them."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

from draftline.core.errors import StoreError
from draftline.retrieval_store.directory_store.store import DirectoryStore
from draftline.retrieval_store.serving.service import RetrievalService, start_repeating


class Counter:
    def __init__(self, failures: int) -> None:
        self.calls, self.failures = 0, failures
        self.done = threading.Event()

    def count(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise StoreError("not there")
        self.done.set()


def test_a_service_that_nobody_holds_any_more_ends(tmp_path: Path) -> None:
    service = RetrievalService(DirectoryStore(tmp_path), poll_seconds=0.02)
    service.start()
    (thread,), ref = service._threads, weakref.ref(service)
    del service
    thread.join(10)
    assert not thread.is_alive()
    assert ref() is None


def test_failures_are_tried_again() -> None:
    counter, stopped = Counter(failures=3), threading.Event()
    thread = start_repeating(
        counter, Counter.count, name="counter", stopped=stopped, first_retry=0.001
    )
    assert counter.done.wait(10)
    stopped.set()
    thread.join(10)
    assert not thread.is_alive()
    assert counter.calls > 3
