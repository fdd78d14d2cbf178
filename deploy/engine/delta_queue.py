"""The queue between an engine's thread and whoever reads one request's deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ...core.errors import DraftlineError, ReaderTooSlow
from ...core.request.output import TokenLogProb, VerifiedTree
from .loop_mailbox import LoopMailbox

# What may wait for the reader of a stream, where nobody says otherwise.
MAX_UNREAD_BYTES = 8 * 1024 * 1024
# About what Python keeps for a delta, for a token of it, and for an alternative of a token.
DELTA_BYTES = 500
TOKEN_BYTES = 100
ALTERNATIVE_BYTES = 100
# Of a tree, whose places and names many share.
NODE_BYTES = 100


class TokenDelta(Protocol):
    """What takes memory of a `core.request.output.Delta`, or of a message with the same fields."""

    @property
    def text(self) -> str:
        """As in `Delta`, like all below."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def log_probs(self) -> tuple[TokenLogProb, ...]: ...  # noqa: D102

    @property
    def prompt_log_probs(self) -> tuple[TokenLogProb | None, ...] | None: ...  # noqa: D102

    @property
    def trees(self) -> tuple[VerifiedTree, ...]: ...  # noqa: D102


D = TypeVar("D", bound=TokenDelta)


class DeltaQueue(Generic[D]):
    """Events of one request, made in any thread and read on one event loop.

    The engine never waits for a reader. Once more than `max_bytes` (as of `delta_bytes`) wait, what
    waits is dropped, `on_full` is called on the loop, and the reader gets `ReaderTooSlow`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_bytes: int, on_full: Callable[[], None]
    ) -> None:
        self._mailbox = LoopMailbox.of(loop)
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._events: asyncio.Queue[D | DraftlineError] = asyncio.Queue()
        self._num_bytes = 0
        self._is_full = False
        self._error: DraftlineError | None = None

    def on_output(self, event: D | DraftlineError) -> None:
        """Take an event from any thread."""
        self._mailbox.post(self.put, event)

    async def next(self) -> D:
        """The next delta. Raises the error that ended the request."""
        if self._error is not None:
            raise self._error
        return self._taken(await self._events.get())

    async def next_all(self) -> list[D]:
        """All deltas that are there, at least one. Raises the error that ended the request."""
        deltas = [await self.next()]
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, DraftlineError):
                # What came before it is read first.
                self._error = event
                break
            deltas.append(self._taken(event))
        return deltas

    def put(self, event: D | DraftlineError) -> None:
        """Take an event on the loop itself."""
        if self._is_full:
            return
        if not isinstance(event, DraftlineError):
            self._num_bytes += delta_bytes(event)
            # One delta alone always passes: it is no sign of a slow reader.
            if self._num_bytes > self._max_bytes and not self._events.empty():
                self._is_full = True
                while not self._events.empty():
                    self._events.get_nowait()
                event = ReaderTooSlow(
                    f"more than {self._max_bytes} bytes of the answer waited to be read"
                )
                self._on_full()
        self._events.put_nowait(event)

    def _taken(self, event: D | DraftlineError) -> D:
        if isinstance(event, DraftlineError):
            raise event
        self._num_bytes -= delta_bytes(event)
        return event


def delta_bytes(delta: TokenDelta) -> int:
    """About how much memory a delta takes."""
    size = DELTA_BYTES + len(delta.text) + TOKEN_BYTES * len(delta.token_ids)
    if delta.trees:
        size += NODE_BYTES * sum(len(tree.token_ids) for tree in delta.trees)
    return size + _log_prob_bytes(delta.log_probs) + _log_prob_bytes(delta.prompt_log_probs or ())


def _log_prob_bytes(tokens: Sequence[TokenLogProb | None]) -> int:
    alternatives = sum(len(token.top_ids) for token in tokens if token is not None)
    return TOKEN_BYTES * len(tokens) + ALTERNATIVE_BYTES * alternatives
