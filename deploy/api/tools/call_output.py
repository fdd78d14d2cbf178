"""Collects what a parser of calls has found, as events."""

from __future__ import annotations

from collections.abc import Callable

from .events import CallArguments, CallStart, Content, Event


class CallOutput:
    """Counts calls, and drops the white space around them; that of other text stays as it is.

    limit   most calls of an answer; further ones are left out
    new_id  makes the id of a call
    """

    def __init__(self, new_id: Callable[[], str], limit: int | None = None) -> None:
        self._new_id = new_id
        self._limit = limit
        # Calls that are complete.
        self.num_calls = 0
        self._space: list[str] = []
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Text that belongs to no call."""
        told = text.rstrip()
        if told:
            self._events.append(Content("".join([*self._space, told])))
            self._space.clear()
        if len(told) < len(text):
            self._space.append(text[len(told) :])

    def start(self, name: str) -> None:
        """A call begins."""
        self._space.clear()
        if not self._is_full:
            self._events.append(CallStart(self.num_calls, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began."""
        if text and not self._is_full:
            self._events.append(CallArguments(self.num_calls, text))

    def end_call(self) -> None:
        """The call is complete."""
        self.num_calls += not self._is_full

    def call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self.start(name)
        self.arguments(arguments)
        self.end_call()

    def finish(self) -> None:
        """The answer has ended; space at its end is content where there was no call."""
        if self._space and not self.num_calls:
            self._events.append(Content("".join(self._space)))
        self._space.clear()

    @property
    def _is_full(self) -> bool:
        return self._limit is not None and self.num_calls >= self._limit
