"""What a model's text turns out to be: content, reasoning, or calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls of an answer are counted from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, which together are a JSON object."""

    index: int
    text: str


# Long texts are read in pieces of this length.
PIECE_CHARS = 4096

Event = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Reads one answer; how its text is cut into pieces changes nothing but the pieces told."""

    def push(self, text: str) -> list[Event]:
        """What the next piece of text makes certain."""
        ...

    def finish(self) -> list[Event]:
        """What is left when the answer has ended."""
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
        """Append what is new."""
        content, reasoning = [], []
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallStart(_, call_id, name):
                    self.calls.append(ParsedCall(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
        self.content += "".join(content)
        self.reasoning += "".join(reasoning)


def parse_whole(parser: Parser, text: str) -> ParsedAnswer:
    """The parts of a finished answer; `parser` must be new."""
    answer = ParsedAnswer()
    # Parsers copy what they have not decided about yet.
    for start in range(0, len(text), PIECE_CHARS):
        answer.add(parser.push(text[start : start + PIECE_CHARS]))
    answer.add(parser.finish())
    return answer
