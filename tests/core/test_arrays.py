"""Arrays as bytes: every array comes back, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.arrays import MAX_LENGTH, PackedArray, pack, unpack
from draftline.core.errors import ProtocolError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

DTYPES = [np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float64, np.bool_]
shapes = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5)


@given(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, shapes)), st.booleans())
def test_arrays_round_trip_in_any_layout(array: np.ndarray, is_transposed: bool) -> None:
    array = array.T if is_transposed else array[::-1]
    back = unpack(pack(array), array.dtype, "field", (1, 2))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    assert back.flags.c_contiguous


def test_bytes_are_little_endian_whatever_the_array_is() -> None:
    packed = pack(np.array([[1, 2]], dtype=">i4"))
    assert packed == PackedArray("<i4", (1, 2), b"\1\0\0\0\2\0\0\0")
    assert pack(np.array([1], dtype=np.int64), np.int32) == PackedArray("<i4", (1,), b"\1\0\0\0")


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (PackedArray("<i8", (1,), bytes(8)), "numbers are '<i8', not '<i4'"),
        (PackedArray("|O", (1,), bytes(8)), r"numbers are '\|O'"),
        (PackedArray("<i4", (2,), bytes(4)), "4 bytes are not a whole '<i4' array"),
        (PackedArray("<i4", (1,), bytes(5)), "5 bytes are not a whole '<i4' array"),
        (PackedArray("<i4", (), bytes(4)), "1 or 2 dimensions"),
        (PackedArray("<i4", (1, 1, 1), bytes(4)), "1 or 2 dimensions"),
        (PackedArray("<i4", (-1, -1), bytes(4)), "dimensions"),
        (PackedArray("<i4", (MAX_LENGTH + 1, 0), b""), "dimensions"),
        (PackedArray("<i4", (2**40, 2**40), bytes(4)), "dimensions"),
    ],
)
def test_what_is_no_array_is_refused(packed: PackedArray, why: str) -> None:
    with pytest.raises(ProtocolError, match=f"^probe.tokens: .*{why}"):
        unpack(packed, np.int32, "probe.tokens", (1, 2))


def test_objects_have_no_bytes() -> None:
    with pytest.raises(TypeError, match="objects"):
        pack(np.array([None], dtype=object))
