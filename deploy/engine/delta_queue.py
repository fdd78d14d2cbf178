"""Queues of deltas from the engine's thread to the reader of a request on an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ...core.errors import DraftlineError, ReaderTooSlow
from ...core.request.output import Delta, TokenLogProb

# Bytes that may wait for the reader of a stream by default.
MAX_UNREAD_BYTES = 8 * 1024 * 1024
# Approximate bytes of a delta, of a token in it, and of an alternative of a token.
DELTA_BYTES = 500
TOKEN_BYTES = 100
ALTERNATIVE_BYTES = 100
# Of a tree; deltas share its positions and names.
NODE_BYTES = 100

_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox] = WeakKeyDictionary()


class DeltaQueue:
    """Events of one request, put from any thread and read on one event loop.

    The engine never waits for a reader. If more than `max_bytes` (by `delta_bytes`) wait, they are
    dropped, `on_full` is called on the loop, and the reader gets `ReaderTooSlow`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_bytes: int, on_full: Callable[[], None]
    ) -> None:
        self._mailbox = LoopMailbox.of(loop)
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._events: asyncio.Queue[Delta | DraftlineError] = asyncio.Queue()
        self._num_bytes = 0
        self._is_full = False
        self._error: DraftlineError | None = None

    def on_output(self, event: Delta | DraftlineError) -> None:
        """Take an event from any thread."""
        self._mailbox.post(self.put, event)

    async def next(self) -> Delta:
        """The next delta. Raises the error that ended the request."""
        if self._error is not None:
            raise self._error
        return self._taken(await self._events.get())

    async def next_all(self) -> list[Delta]:
        """All waiting deltas, at least one. Raises the error that ended the request."""
        deltas = [await self.next()]
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, DraftlineError):
                # What came before it is read first.
                self._error = event
                break
            deltas.append(self._taken(event))
        return deltas

    def put(self, event: Delta | DraftlineError) -> None:
        """Take an event on the loop itself."""
        if self._is_full:
            return
        if not isinstance(event, DraftlineError):
            self._num_bytes += delta_bytes(event)
            # A single delta always passes: the reader need not be slow.
            if self._num_bytes > self._max_bytes and not self._events.empty():
                self._is_full = True
                while not self._events.empty():
                    self._events.get_nowait()
                event = ReaderTooSlow(
                    f"more than {self._max_bytes} bytes of the answer waited to be read"
                )
                self._on_full()
        self._events.put_nowait(event)

    def _taken(self, event: Delta | DraftlineError) -> Delta:
        if isinstance(event, DraftlineError):
            raise event
        self._num_bytes -= delta_bytes(event)
        return event


class LoopMailbox:
    """Calls for one event loop, from any thread, in order.

    A step of the engine calls the sink of every request. Waking the loop for each would take longer
    than the calls themselves, and would release the interpreter lock each time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_woken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopMailbox:
        """The mailbox of the running loop."""
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            mailbox = _mailboxes[loop] = cls(loop)
        return mailbox

    def post(self, call: Callable[[Any], None], event: object) -> None:
        """Call a function on the loop with this event."""
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
        # First: posts from now on wake the loop again.
        self._is_woken = False
        try:
            while self._calls:
                call, event = self._calls.popleft()
                call(event)
        finally:
            # An error of one must not stop the others.
            if self._calls:
                self._wake()


def delta_bytes(delta: Delta) -> int:
    """Approximate bytes of a delta."""
    size = DELTA_BYTES + len(delta.text) + TOKEN_BYTES * len(delta.token_ids)
    if delta.trees:
        size += NODE_BYTES * sum(len(tree.token_ids) for tree in delta.trees)
    return size + _log_prob_bytes(delta.log_probs) + _log_prob_bytes(delta.prompt_log_probs or ())


def _log_prob_bytes(tokens: Sequence[TokenLogProb | None]) -> int:
    alternatives = sum(len(token.top_ids) for token in tokens if token is not None)
    return TOKEN_BYTES * len(tokens) + ALTERNATIVE_BYTES * alternatives
