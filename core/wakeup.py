"""How the engine's loop waits for whichever of many events comes first."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Remembers that something happened until the loop has looked. One event loop uses it."""

    __slots__ = ("_has_event", "_timer", "_waiter")

    def __init__(self) -> None:
        self._has_event = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def notify(self, _event: object = None) -> None:
        """Something happened. Takes any argument, to serve as the callback of a future."""
        self._has_event = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def notify_in(self, seconds: float | None) -> None:
        """Something happens then, and no more what was to happen before; None: nothing does."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.notify)

    def clear(self) -> None:
        """Forget what happened so far: the caller looks at everything now."""
        self._has_event = False

    async def wait(self, timeout_s: float | None) -> bool:
        """Whether something happened since the last `clear`, or does within `timeout_s`; None: for
        ever."""
        if not self._has_event:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait((self._waiter,), timeout=timeout_s)
            finally:
                self._waiter = None
        return self._has_event
