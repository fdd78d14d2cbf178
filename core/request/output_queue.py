"""What a step tells its requests, kept until the next step is on its way."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ..errors import DraftlineError, as_request_failure, place_of
from .output import Delta
from .request import RequestState

logger = logging.getLogger(__name__)


class OutputQueue:
    """Events for the sinks of requests, in order. One event loop uses it.

    A sink wakes other threads, which take the interpreter while they format and send. Between an
    answer and the next step the stages would wait for that; beside the next step they do not.
    """

    __slots__ = ("_events", "_fail")

    def __init__(self, fail: Callable[[RequestState, DraftlineError], None]) -> None:
        """`fail` ends a request whose sink failed, if it has not ended."""
        self._events: deque[tuple[RequestState, Delta | DraftlineError]] = deque()
        self._fail = fail

    def post(self, state: RequestState, event: Delta | DraftlineError) -> None:
        """Keep an event for a request's sink."""
        self._events.append((state, event))

    def deliver(self) -> None:
        """Tell all that is kept, and what sinks cause meanwhile."""
        while self._events:
            self.tell(*self._events.popleft())

    def tell(self, state: RequestState, event: Delta | DraftlineError) -> None:
        """Tell one event at once; also for other threads, where it is the last word."""
        try:
            state.request.sink(event)
        except Exception as error:  # noqa: BLE001 - it supervises: the other requests go on
            self._sink_failed(state, event, error)

    def _sink_failed(
        self, state: RequestState, event: Delta | DraftlineError, error: Exception
    ) -> None:
        if isinstance(event, Delta) and event.finish_reason is None:
            self._fail(state, as_request_failure(error, state.request_id))
            return
        # It was the last event: only the log shows this.
        logger.error("event=sink_failed request_id=%s error=%s", state.request_id, place_of(error))
