"""Hands what other threads make to an event loop, all that comes together with one wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox] = WeakKeyDictionary()


class LoopMailbox:
    """Calls for one event loop, from any thread, in order.

    A step of the engine tells every request of its tokens. To wake the loop for each would take
    longer than all else that telling takes, and would let go of the interpreter each time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_woken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopMailbox:
        """The one of this loop; called on the loop itself."""
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            mailbox = _mailboxes[loop] = cls(loop)
        return mailbox

    def post(self, call: Callable[[Any], None], event: object) -> None:
        """Call on the loop, with this event."""
        # A server that shuts down closes its loop before the engine's last output.
        if self._loop.is_closed():
            return
        self._calls.append((call, event))
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # First: whoever posts from now on wakes the loop again.
        self._is_woken = False
        try:
            while self._calls:
                call, event = self._calls.popleft()
                call(event)
        finally:
            # One that fails keeps nothing from the others.
            if self._calls:
                self._wake()
