"""Messages as msgpack: every field is checked against its annotation, arrays by their numpy type.

Whatever the bytes are, no other objects are made of them. Every field must be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from ...core.arrays import MAX_LENGTH, PackedArray, pack, unpack
from ...core.errors import ProtocolError, RequestError

T = TypeVar("T")
# Types of fields that are narrower than their annotations, by class and name of the field.
Narrowed = Mapping[tuple[type, str], Any]

# Arrays of messages have so many dimensions.
DIMS = (1, 2)
# So many are read, to be refused with a reason.
MAX_DIMS = 8
# Of an error's text: where in a message it is.
PLACE = re.compile(r" - at .*`\$(?P<path>[^`]*)`$")
STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+|\.\.\.)\]")


def encode(message: object) -> bytes:
    """A named tuple or dataclass. Raises `TypeError` or `OverflowError` if it has no encoding."""
    return _encoder.encode(message)


def packed_array(max_length: int = MAX_LENGTH) -> Any:
    """The type of an array as msgpack has it. No dimension may be longer than `max_length`."""
    length = Annotated[int, msgspec.Meta(ge=0, le=max_length)]
    shape = Annotated[list[length], msgspec.Meta(max_length=MAX_DIMS)]
    # A view: the bytes are not copied before the array is made.
    return tuple[str, shape, memoryview]


class MessageDecoder(Generic[T]):
    """Reads messages of one type. `refusal` is what errors begin with."""

    def __init__(self, message: type[T], refusal: str, narrowed: Narrowed | None = None) -> None:
        # Where the library knows no type, as in the place of an array, it makes objects of all that
        # it finds there. So the bytes are read as a type that it knows to the last part, and only
        # what that holds becomes a message.
        self._decoder = msgspec.msgpack.Decoder(_wire_type(message, narrowed or {}))
        self._message = message
        self._refusal = refusal

    def decode(self, data: bytes | bytearray | msgspec.Raw) -> T:
        """The message. Raises `ProtocolError`, which names the field, for other bytes."""
        try:
            plain = self._decoder.decode(data)
            return msgspec.convert(plain, self._message, from_attributes=True, dec_hook=_unpack)
        # Text that is none, keys that cannot be keys and too deep nesting raise errors of Python's
        # own; parameters of a request check themselves.
        except (
            msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError, RequestError,
        ) as error:  # fmt: skip
            raise ProtocolError(f"{self._refusal}: {_told(self._message, str(error))}") from error


def _pack(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return pack(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no field of a message")


def _unpack(kind: Any, value: Any) -> object:
    """An array of the annotated type `kind`, of what was read as a `packed_array`."""
    try:
        return unpack(PackedArray(*value), _dtype(kind), "array", DIMS)
    except ProtocolError as error:
        # Of a ValueError the library tells at which field it was raised.
        raise ValueError(str(error)) from error


@cache
def _dtype(kind: Any) -> np.dtype:
    """`NDArray[np.int32]` is `ndarray[shape, dtype[np.int32]]`."""
    return np.dtype(get_args(get_args(kind)[1])[0])


def _wire_type(kind: Any, narrowed: Narrowed) -> Any:
    """What msgpack holds of the annotated type `kind`, to the last part."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is np.ndarray:
        return packed_array()
    if origin in (Union, UnionType):
        return Union[tuple(_wire_type(part, narrowed) for part in parts)]  # noqa: UP007 - no `|` of a sequence
    if fields := _fields(kind):
        wire = {
            name: narrowed.get((kind, name)) or _wire_type(part, narrowed)
            for name, part in fields.items()
        }
        if issubclass(kind, tuple):
            return tuple[tuple(wire.values())]
        return msgspec.defstruct(kind.__name__, list(wire.items()))
    if origin is None or origin is Annotated or not isinstance(origin, type):
        return kind
    container: Any = origin
    return container[tuple(part if part is ... else _wire_type(part, narrowed) for part in parts)]


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Annotations of a named tuple's or dataclass's fields; none of other types."""
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return get_type_hints(kind, include_extras=True)
    return {}


def _told(message: Any, error: str) -> str:
    """An error of the library, which counts the fields of named tuples, behind their names."""
    found = PLACE.search(error)
    names = ".".join(_names(message, found["path"])) if found else ""
    return f"{names}: {error}" if names else error


def _names(kind: Any, path: str) -> Iterator[str]:
    """The fields on the way, as far as it leads through types of ours."""
    for step in STEP.finditer(path):
        for part in _alternatives(kind):
            fields, name = _fields(part), step["name"]
            if fields and issubclass(part, tuple) and name is None and step["index"].isdigit():
                name = dict(enumerate(fields)).get(int(step["index"]))
            if name in fields:
                yield name
                kind = fields[name]
                break
            if name is None and get_origin(part) not in (None, np.ndarray):
                # An entry of a list, or a value of a mapping.
                kind = [inner for inner in get_args(part) if inner is not ...][-1]
                break
        else:
            return


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
