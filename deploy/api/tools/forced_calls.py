"""Calls in an answer that must make some: its text follows a grammar, so that arguments can be told
as they come."""

from __future__ import annotations

from collections.abc import Callable

from .call_syntax import CallSyntax
from .events import CallOutput, Event
from .json_objects import ObjectScanner, State


class ForcedCallParser:
    """Reads calls of one syntax; what does not follow it is content.

    An answer that is cut off inside of a call's arguments has them as far as they came. One that is
    cut off before its first call is content; the beginning of a further call is left out.
    """

    def __init__(self, syntax: CallSyntax, new_id: Callable[[], str]) -> None:
        self._syntax = syntax
        self._out = CallOutput(new_id)
        self._buffer = ""
        self._header = ""
        self._scanner = ObjectScanner()
        self._state: Callable[[], bool] = self._first

    def push(self, text: str) -> list[Event]:
        """What the next piece of text makes certain."""
        self._buffer += text
        while self._state():
            pass
        return self._out.take()

    def finish(self) -> list[Event]:
        """What is left when the answer has ended."""
        if not self._out.num_calls:
            header = self._header if self._state == self._name else ""
            self._out.text(header + self._buffer)
        self._buffer = ""
        self._out.finish()
        return self._out.take()

    # A state reads the start of the buffer; it returns whether it got further.

    def _first(self) -> bool:
        return self._expect(self._syntax.before + self._syntax.open, self._name)

    def _name(self) -> bool:
        name, between, rest = self._buffer.partition(self._syntax.between)
        if not between:
            return False
        self._buffer = rest
        self._out.start(name)
        self._scanner = ObjectScanner()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        end = self._scanner.feed(self._buffer)
        is_broken = self._scanner.state is State.BROKEN
        self._out.arguments(self._buffer[: end - is_broken])
        self._buffer = self._buffer[end - is_broken :]
        if self._scanner.state is State.OPEN:
            return False
        self._out.end_call()
        self._state = self._text if is_broken else self._close
        return True

    def _close(self) -> bool:
        return self._expect(self._syntax.close, self._next)

    def _next(self) -> bool:
        syntax = self._syntax
        separator = syntax.separator + syntax.open
        if self._buffer and not separator.startswith(self._buffer[: len(separator)]):
            return self._expect(syntax.after, self._text)
        return self._expect(separator, self._name)

    def _text(self) -> bool:
        self._out.text(self._buffer)
        self._buffer = ""
        return False

    def _expect(self, literal: str, then: Callable[[], bool]) -> bool:
        if self._buffer.startswith(literal):
            self._header = literal
            self._buffer = self._buffer[len(literal) :]
            self._state = then
            return True
        if literal.startswith(self._buffer):
            return False
        self._state = self._text
        return True
