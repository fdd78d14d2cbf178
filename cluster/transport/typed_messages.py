"""Messages as msgpack: every field is checked against its annotation, arrays by their numpy type.

Whatever the bytes are, no other objects are made of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np

from ...core.arrays import PackedArray, pack, unpack
from ...core.errors import ProtocolError, RequestError

T = TypeVar("T")

# Arrays of messages have so many dimensions.
DIMS = (1, 2)


def encode(message: object) -> bytes:
    """A named tuple or dataclass. Raises `TypeError` or `OverflowError` if it has no encoding."""
    return _encoder.encode(message)


class MessageDecoder(Generic[T]):
    """Reads messages of one type. `refusal` is what errors begin with."""

    def __init__(self, message: type[T], refusal: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(message, dec_hook=_unpack)
        self._refusal = refusal

    def decode(self, data: bytes | bytearray | msgspec.Raw) -> T:
        """The message. Raises `ProtocolError`, which names the field, for other bytes."""
        try:
            return self._decoder.decode(data)
        # Text that is none, keys that cannot be keys and too deep nesting raise errors of Python's
        # own; parameters of a request check themselves.
        except (
            msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError, RequestError,
        ) as error:  # fmt: skip
            raise ProtocolError(f"{self._refusal}: {error}") from error


def _pack(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return pack(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no field of a message")


def _unpack(kind: Any, value: object) -> object:
    """An array of the annotated type `kind`, from what msgpack holds in its place."""
    packed = msgspec.convert(value, PackedArray)
    try:
        return unpack(packed, _dtype(kind), "array", DIMS)
    except ProtocolError as error:
        # Of a ValueError the library tells at which field it was raised.
        raise ValueError(str(error)) from error


@cache
def _dtype(kind: Any) -> np.dtype:
    """`NDArray[np.int32]` is `ndarray[shape, dtype[np.int32]]`."""
    return np.dtype(get_args(get_args(kind)[1])[0])


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
