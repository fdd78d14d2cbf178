"""Reasoning between `<think>` and `</think>`, apart from the answer that follows it."""

from __future__ import annotations

from collections.abc import Callable

from .call_parsers import MAX_SPACE, overlap
from .events import Content, Event, Parser, Reasoning

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


def ends_inside(prompt: str) -> bool:
    """Whether a prompt leaves its last `<think>` open, for the answer to go on in it."""
    return prompt.rstrip().endswith(THINK_OPEN)


def ends_behind(prompt: str) -> bool:
    """Whether a prompt ends with reasoning that is over, such as an empty one."""
    return prompt.rstrip().endswith(THINK_CLOSE)


class ReasoningParser:
    """Splits one answer; what follows the reasoning goes to `then`.

    White space around the reasoning, and line ends before what follows it, are left out.
    """

    def __init__(self, then: Parser, *, inside: bool) -> None:
        """inside: the answer begins with reasoning, whether or not it opens it."""
        self._then = then
        self._buffer = ""
        self._inside = inside
        self._has_thought = False
        self._state: Callable[[], list[Event] | None] = self._begin

    def push(self, text: str) -> list[Event]:
        """What the next piece of text makes certain."""
        self._buffer += text
        events: list[Event] = []
        while (more := self._state()) is not None:
            events += more
        return events

    def finish(self) -> list[Event]:
        """What is left when the answer has ended."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._thinking:
            return [*self._thought(rest.rstrip()), *self._then.finish()]
        if self._state == self._between:
            return self._then.finish()
        is_thought = self._inside and self._state == self._begin and rest.strip()
        events = self._thought(rest.strip()) if is_thought else self._then.push(rest)
        return [*events, *self._then.finish()]

    # A state takes the start of the buffer; None: it needs more text.

    def _begin(self) -> list[Event] | None:
        text = self._buffer.lstrip()
        is_near = len(self._buffer) - len(text) <= MAX_SPACE
        if is_near and text.startswith(THINK_OPEN):
            self._buffer = text[len(THINK_OPEN) :]
            self._inside = True
            self._state = self._thinking
        elif is_near and THINK_OPEN.startswith(text):
            return None
        else:
            self._buffer = text if self._inside else self._buffer
            self._state = self._thinking if self._inside else self._answer
        return []

    def _thinking(self) -> list[Event] | None:
        """Space at the end is held back: it may be the last of the reasoning."""
        if not self._has_thought:
            self._buffer = self._buffer.lstrip()
        end = self._buffer.find(THINK_CLOSE)
        if end >= 0:
            thought, self._buffer = self._buffer[:end], self._buffer[end + len(THINK_CLOSE) :]
            self._state = self._between
            return self._thought(thought.rstrip())
        sure = self._buffer[: len(self._buffer) - overlap(self._buffer, THINK_CLOSE)].rstrip()
        self._buffer = self._buffer[len(sure) :]
        return self._thought(sure) or None

    def _between(self) -> list[Event] | None:
        self._buffer = self._buffer.lstrip("\r\n")
        if not self._buffer:
            return None
        self._state = self._answer
        return []

    def _answer(self) -> list[Event] | None:
        rest, self._buffer = self._buffer, ""
        return self._then.push(rest) if rest else None

    def _thought(self, text: str) -> list[Event]:
        self._has_thought = self._has_thought or bool(text)
        return [Reasoning(text)] if text else []


class PlainParser:
    """An answer without calls: all of it is content."""

    def push(self, text: str) -> list[Event]:
        """The text itself."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []
