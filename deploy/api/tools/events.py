"""Events of an answer: content, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

# Long texts are read in pieces of this length.
PIECE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls of an answer are counted from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArgumentsDelta:
    """The next part of a call's arguments, which together are a JSON object."""

    index: int
    text: str


Event = Content | ReasoningDelta | CallStart | CallArgumentsDelta


class Parser(Protocol):
    """Reads one answer; how its text is cut into pieces does not change what they hold together."""

    def push(self, text: str) -> list[Event]:
        """Events that become certain with the next piece of text."""
        ...

    def finish(self) -> list[Event]:
        """The rest, after the end of the answer."""
        ...


@dataclass(slots=True)
class ParsedCall:
    """A call of a tool; `arguments` is JSON."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """All events of an answer, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Append events."""
        content, reasoning = [], []
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case CallStart(_, call_id, name):
                    self.calls.append(ParsedCall(call_id, name))
                case CallArgumentsDelta(index, text):
                    self.calls[index].arguments += text
        self.content += "".join(content)
        self.reasoning += "".join(reasoning)


def parse_whole(parser: Parser, text: str) -> ParsedAnswer:
    """The parts of a finished answer; `parser` must be new."""
    answer = ParsedAnswer()
    # Parsers copy their undecided text, so long texts go in pieces.
    for start in range(0, len(text), PIECE_CHARS):
        answer.add(parser.push(text[start : start + PIECE_CHARS]))
    answer.add(parser.finish())
    return answer


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
        words = text.rstrip()
        if words:
            self._events.append(Content("".join([*self._space, words])))
            self._space.clear()
        if len(words) < len(text):
            self._space.append(text[len(words) :])

    def start(self, name: str) -> None:
        """A call begins."""
        self._space.clear()
        if not self._is_full:
            self._events.append(CallStart(self.num_calls, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began."""
        if text and not self._is_full:
            self._events.append(CallArgumentsDelta(self.num_calls, text))

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
