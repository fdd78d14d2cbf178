"""Calls of tools in the text that a model writes freely, by the family of its chat template.

A call is reported when it is complete. Text that is no call, or is cut off, is content, so no text
is lost. A call names one of the offered tools.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from enum import Enum
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from .events import CallOutput, Event

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


# More white space than this does not belong to a call.
MAX_SPACE = 1024
# What begins like a call and breaks off later than this is not looked through for other calls.
MAX_RESCAN = 4096


class CallParser(ABC):
    """Finds calls after a tag.

    The buffer begins at what is not decided yet: text that the tag may begin in, a call with all
    that led to it, or what follows a call.
    """

    tag: ClassVar[str]

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str], limit: int | None = None
    ) -> None:
        """names: of the tools; limit: most calls, or None."""
        self._names = frozenset(names)
        self._out = CallOutput(new_id, limit)
        self._buffer = ""
        # What came after the buffer while an object is read: it may become long.
        self._pieces: list[str] = []
        self._at_end = False
        self._scanner = ObjectScanner()
        self._scan_start = 0
        self._state: Callable[[], bool] = self._text

    def push(self, text: str) -> list[Event]:
        """Events that become certain with the next piece of text."""
        if self._state == self._object:
            self._pieces.append(text)
            self._scanner.feed(text)
            if self._scanner.state is State.OPEN:
                return []
            self._join()
        else:
            self._buffer += text
        self._run()
        return self._out.take()

    def finish(self) -> list[Event]:
        """The rest, after the end of the answer."""
        self._at_end = True
        if self._pieces:
            self._join()
        else:
            self._run()
        self._out.text(self._buffer)
        self._buffer = ""
        self._out.finish()
        return self._out.take()

    def _join(self) -> None:
        self._buffer += "".join(self._pieces)
        self._pieces.clear()

    def _run(self) -> None:
        while self._state():
            pass

    # A state decides about the start of the buffer; it returns whether it got further.

    def _text(self) -> bool:
        start = self._buffer.find(self.tag)
        if start < 0:
            keep = overlap(self._buffer, self.tag)
            self._out.text(self._take(len(self._buffer) - keep))
            return False
        self._out.text(self._take(start))
        self._state = self._opened
        return True

    @abstractmethod
    def _opened(self) -> bool:
        """The buffer begins with the tag."""

    @abstractmethod
    def _after_call(self) -> bool:
        """The buffer begins behind a call."""

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _skip_space(self, start: int) -> int | None:
        """Where the next character stands; None: it has not come."""
        rest = self._buffer[start:]
        num_spaces = len(rest) - len(rest.lstrip())
        if num_spaces > MAX_SPACE:
            return start
        return None if num_spaces == len(rest) else start + num_spaces

    def _scan(self, start: int) -> bool:
        """Read the object at `start`, now and as it grows."""
        self._scanner = ObjectScanner()
        self._scan_start = start
        self._state = self._object
        self._scanner.feed(self._buffer, start)
        return True

    def _object(self) -> bool:
        scanner = self._scanner
        end = self._scan_start + scanner.length
        if scanner.state is State.OPEN:
            return False
        call = None
        if scanner.state is State.ENDED:
            call = self._read(self._buffer[self._scan_start : end], scanner.cuts)
        if call is None:
            return self._refuse(end)
        self._out.call(*call)
        self._take(end)
        self._state = self._after_call
        return True

    def _read(self, text: str, cuts: list[int]) -> Call | None:
        return read_call(text, cuts, self._names)

    def _refuse(self, end: int = 0) -> bool:
        """No call begins here: the tag, or the first character, is text; so is a long object."""
        count = len(self.tag) if self._buffer.startswith(self.tag) else 1
        self._out.text(self._take(end if end > MAX_RESCAN else count))
        self._state = self._text
        return True

    def _resume_text(self) -> bool:
        self._state = self._text
        return True


class HermesParser(CallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3."""

    tag = "<tool_call>"
    close: ClassVar[str] = "</tool_call>"

    def _opened(self) -> bool:
        start = self._skip_space(len(self.tag))
        return False if start is None else self._scan(start)

    def _after_call(self) -> bool:
        start = self._skip_space(0)
        if start is None:
            return False
        rest = self._buffer[start : start + len(self.close)]
        if rest == self.close:
            self._take(start + len(self.close))
        elif self.close.startswith(rest):
            # The tag is still coming, or was cut off.
            self._buffer = "" if self._at_end else self._buffer
            return False
        return self._resume_text()


class LlamaParser(CallParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`: Llama 3.

    Several calls are separated by semicolons.
    """

    tag = "<|python_tag|>"

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str], limit: int | None = None
    ) -> None:
        super().__init__(names, new_id, limit)
        self._state = self._begin

    def _begin(self) -> bool:
        start = self._skip_space(0)
        if start is None:
            return False
        if self._buffer[start] != "{":
            return self._resume_text()
        self._out.text(self._take(start))
        return self._scan(0)

    def _opened(self) -> bool:
        start = self._skip_space(len(self.tag))
        return False if start is None else self._scan(start)

    def _after_call(self) -> bool:
        start = self._skip_space(0)
        if start is None:
            return False
        if self._buffer[start] != ";":
            return self._resume_text()
        start = self._skip_space(start + 1)
        if start is None:
            # A separator with nothing behind it says nothing.
            self._buffer = "" if self._at_end else self._buffer
            return False
        return self._scan(start) if self._buffer[start] == "{" else self._resume_text()


class MistralParser(CallParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and the newer
    `[TOOL_CALLS]name[ARGS]{...}`: Mistral."""

    tag = "[TOOL_CALLS]"
    _header = re.compile(r"\s*([a-zA-Z0-9_.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*(?=\{)")
    _LONGEST_HEADER = 512

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str], limit: int | None = None
    ) -> None:
        super().__init__(names, new_id, limit)
        self._name: str | None = None
        self._in_list = False

    def _opened(self) -> bool:
        start = self._skip_space(len(self.tag))
        if start is None:
            return False
        self._name = None
        self._in_list = self._buffer[start] == "["
        if self._in_list:
            start = self._skip_space(start + 1)
            return False if start is None else self._scan(start)
        if self._buffer[start] == "{":
            return self._scan(start)
        return self._named(start)

    def _named(self, start: int) -> bool:
        brace = self._buffer.find("{", start)
        if brace < 0 and len(self._buffer) - start < self._LONGEST_HEADER:
            return False
        is_near = 0 <= brace - start < self._LONGEST_HEADER
        header = self._header.match(self._buffer, start) if is_near else None
        if header is None or header[1] not in self._names:
            return self._refuse()
        self._name = header[1]
        return self._scan(header.end())

    def _read(self, text: str, cuts: list[int]) -> Call | None:
        if self._name is None:
            return super()._read(text, cuts)
        arguments = read_arguments(text)
        return None if arguments is None else Call(self._name, arguments)

    def _after_call(self) -> bool:
        if not self._in_list:
            return self._resume_text()
        start = self._skip_space(0)
        if start is None:
            return False
        if self._buffer[start] == "]":
            self._take(start + 1)
            return self._resume_text()
        if self._buffer[start] != ",":
            return self._resume_text()
        start = self._skip_space(start + 1)
        return False if start is None else self._scan(start)


def overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` that ends `text`."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
