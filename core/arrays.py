"""Names of array types, which are numpy and are never written after construction; arrays as bytes.

Every message between processes takes its arrays through `pack` and `unpack`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import ProtocolError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt8 = NDArray[np.uint8]
UInt16 = NDArray[np.uint16]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
# Begin and end, seconds.
Span = tuple[float, float]
ROOT = -1

# Of one dimension: numpy's own limits, which depend on the platform, are never reached.
MAX_LENGTH = 2**31 - 1


class PackedArray(NamedTuple):
    """An array as bytes.

    dtype  numpy's name of the type, little-endian: `<i4`, `<f4`, `|b1`
    shape  length of each dimension
    data   the numbers in C order
    """

    dtype: str
    shape: Sequence[int]
    data: bytes


def lengths_of(ends: Int64) -> Int64:
    """int64 [parts]: how long each of several parts is that stand one behind the other."""
    # `np.diff` would take ten times as long.
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    return lengths


def pack(array: NDArray, dtype: DTypeLike | None = None) -> PackedArray:
    """The array as bytes of `dtype`, or of its own type; of any shape and strides.

    Raises `TypeError` for an array of Python's objects.
    """
    wire, name = _wire_type(array.dtype if dtype is None else np.dtype(dtype))
    return PackedArray(name, array.shape, array.astype(wire, copy=False).tobytes())


def unpack(
    packed: PackedArray, dtype: DTypeLike, field: str, dims: Sequence[int] = (1,)
) -> NDArray:
    """A new array in this machine's byte order, of as many dimensions as one of `dims` says.

    Raises `ProtocolError`, which names `field`, for bytes that are no whole array of `dtype`.
    """
    expected = np.dtype(dtype)
    wire, name = _wire_type(expected)
    given, shape, data = packed
    if given != name:
        raise ProtocolError(f"{field}: numbers are {given[:8]!r}, not {name!r}")
    # Their number is checked first: a sender of too many dimensions may send millions.
    if len(shape) not in dims or min(shape) < 0 or max(shape) > MAX_LENGTH:
        raise ProtocolError(f"{field}: not an array of {' or '.join(map(str, dims))} dimensions")
    if len(data) != math.prod(shape) * wire.itemsize:
        raise ProtocolError(f"{field}: {len(data)} bytes are not a whole {name!r} array of {shape}")
    array = np.frombuffer(data, dtype=wire)
    # A copy, since compiled loops and torch treat arrays that cannot be written as another kind.
    return (array if len(shape) == 1 else array.reshape(shape)).astype(expected)


@cache
def _wire_type(dtype: np.dtype) -> tuple[np.dtype, str]:
    """The little-endian type and its name."""
    if dtype.hasobject:
        raise TypeError("an array of objects has no bytes to send")
    wire = dtype.newbyteorder("<")
    return wire, wire.str
