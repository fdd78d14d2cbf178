"""JSON objects inside a growing text: where one ends, and whether it calls a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

# What JSON has outside of strings: brackets, separators, spaces, numbers, true, false and null.
_PLAIN = frozenset("{}[]:, \t\r\n0123456789+-.eEtrufalsn")
# Runs that change nothing: in a string, between an object's own values, and deeper.
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SHALLOW = re.compile(r"[0-9 \t\r\n+\-.eEtrufalsn]*")
_DEEP = re.compile(r"[0-9 \t\r\n+\-.eEtrufalsn:,]*")
ARGUMENT_KEYS = ("arguments", "parameters")


class State(Enum):
    """Where a scanner stands."""

    OPEN = 0
    ENDED = 1
    BROKEN = 2


class ObjectScanner:
    """Follows one JSON object from its brace to the brace that closes it.

    It finds most of what is no JSON at the first wrong character; the rest shows when the object is
    read. `cuts` are the places of its own colons and commas, those inside of its values not.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "cuts", "length", "state")

    def __init__(self) -> None:
        self.state = State.OPEN
        self.length = 0
        self.cuts: list[int] = []
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str, start: int = 0) -> int:
        """Read `text` from `start` to the object's end; where reading stopped."""
        index, first = start, self.length - start
        while index < len(text) and self.state is State.OPEN:
            index = self._skip(text, index)
            if index < len(text):
                self._step(text[index], first + index)
                index += 1
        self.length = first + index
        return index

    def _skip(self, text: str, index: int) -> int:
        """The index behind characters that change nothing: most of long arguments."""
        if self._escaped or not self._depth:
            return index
        runs = _IN_STRING if self._in_string else _SHALLOW if self._depth == 1 else _DEEP
        run = runs.match(text, index)
        return index if run is None else run.end()

    def _step(self, char: str, position: int) -> None:
        if self._in_string:
            self._step_in_string(char)
        elif char == '"' and self._depth:
            self._in_string = True
        elif char not in _PLAIN or (not self._depth and char != "{"):
            self.state = State.BROKEN
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.state = State.OPEN if self._depth else State.ENDED
        elif char in ":," and self._depth == 1:
            self.cuts.append(position)

    def _step_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class Call(NamedTuple):
    """The name of a tool, and its arguments as JSON."""

    name: str
    arguments: str


def read_call(text: str, cuts: list[int], names: Collection[str]) -> Call | None:
    """The call that an object is; None if it is not JSON, or calls none of the tools.

    cuts  as `ObjectScanner` found them: the arguments keep the spelling that the model gave them
    """
    value = _object(text)
    name = None if value is None else value.get("name")
    if value is None or not isinstance(name, str) or name not in names:
        return None
    key = next((key for key in ARGUMENT_KEYS if key in value), None)
    arguments = None if key is None else value[key]
    if arguments is None:
        return Call(name, "{}")
    if isinstance(arguments, dict):
        return Call(name, _members(text, cuts)[key or ""])
    # Some models write the arguments as JSON inside a string.
    is_text = isinstance(arguments, str) and _object(arguments) is not None
    return Call(name, arguments) if is_text else None


def read_arguments(text: str) -> str | None:
    """`text` where it is a JSON object, else None."""
    return None if _object(text) is None else text


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _members(text: str, cuts: list[int]) -> dict[str, str]:
    """The values of an object as they are spelled, by key; the last one of a key counts."""
    edges = [text.index("{"), *cuts, text.rindex("}")]
    parts = [text[start + 1 : end] for start, end in pairwise(edges)]
    return {
        json.loads(key): value.strip() for key, value in zip(parts[::2], parts[1::2], strict=True)
    }
