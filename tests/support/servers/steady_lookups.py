"""Lookups that go on in a thread while a test breaks what is behind them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from draftline.core.errors import DraftlineError
from draftline.core.interfaces import Lookup
from support.inputs.segments import context

Answer = frozenset[int]


def answer(lookup: Lookup) -> Answer:
    """The tokens that namespace `shared` knows after 1, 2."""
    return frozenset(lookup.lookup([context(1, 2)], ["shared"], [8])[0].tokens.tolist())


class SteadyLookups:
    """What was answered: `seen` in order, repeats left out; `failures` raised."""

    def __init__(self) -> None:
        self.seen: list[Answer] = []
        self.failures: list[BaseException] = []
        self.count = 0

    def add(self, found: Answer) -> None:
        self.count += 1
        if found not in self.seen[-1:]:
            self.seen.append(found)


@contextmanager
def steady_lookups(lookup: Lookup) -> Iterator[SteadyLookups]:
    """Look up again and again until the block ends."""
    lookups = SteadyLookups()
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                lookups.add(answer(lookup))
            except (DraftlineError, LookupError, ValueError, TypeError) as error:
                lookups.failures.append(error)
            # The other threads of the test need the interpreter, too.
            stopped.wait(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lookups
    finally:
        stopped.set()
        thread.join()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Return as soon as it holds; fail if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}"
        time.sleep(0.01)
