"""JSON of answers, written so that other threads get on meanwhile.

The standard library's encoder runs in C and keeps the interpreter to itself until a call ends, but
where it asks Python for a value that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import Response

from ....cluster.loop_calls import off_loop

# So many values are written in about a millisecond.
INLINE_VALUES = 2_000


class LazyList:
    """A long list in a body: `make` of each of the values, called when it is written.

    No dataclass: pydantic would look into it.
    """

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[Any], Any], values: Sequence[Any]) -> None:
        self._make = make
        self._values = values

    def plain(self) -> list[_Part]:
        """What the encoder writes."""
        return [_Part(self._make, value) for value in self._values]


class _Part:
    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[Any], Any], value: Any) -> None:
        self._make = make
        self._value = value

    def plain(self) -> Any:
        return self._make(self._value)


def write_json(value: Any) -> str:
    """Compact JSON of plain values and `LazyList`s."""
    return _ENCODER.encode(value)


def write_object(fields: Mapping[str, Any]) -> str:
    """Compact JSON of an object, whose own long lists are written in slices."""
    parts = [f"{write_json(name)}:{_write_field(value)}" for name, value in fields.items()]
    return f"{{{','.join(parts)}}}"


def _write_field(value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        return write_json(value)
    starts = range(0, len(value), INLINE_VALUES)
    slices = [write_json(value[start : start + INLINE_VALUES])[1:-1] for start in starts]
    return f"[{','.join(slices)}]"


async def json_response(fields: Mapping[str, Any], num_values: int) -> Response:
    """A response of a JSON object with so many values in it."""
    if num_values <= INLINE_VALUES:
        content = write_object(fields).encode()
    else:
        content = await off_loop(lambda: write_object(fields).encode())
    return Response(content, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, LazyList | _Part):
        return value.plain()
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
