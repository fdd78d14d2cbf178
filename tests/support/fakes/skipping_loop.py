"""An event loop whose time is a test's clock: where nothing else is left to do, it skips ahead."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from support.fakes.fake_link import FakeClock

T = TypeVar("T")


class SkippingSelector(selectors.DefaultSelector):
    """Waits for no timer: the clock is moved to it. Other threads are not heard meanwhile."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; time goes by otherwise."""
        assert timeout is not None, "nothing will ever happen"
        self._clock.now += max(timeout, 0.0)
        return super().select(0)


def run_skipping(clock: FakeClock, main: Coroutine[Any, Any, T]) -> T:
    """The result of `main` in such a loop."""

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(SkippingSelector(clock))
        loop.time = clock
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main)
