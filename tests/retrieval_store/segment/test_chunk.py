from __future__ import annotations

import pytest
from draftline.core.errors import StoreError
from draftline.retrieval_store.segment.packed_file import seal, unseal
from hypothesis import given
from hypothesis import strategies as st


@given(payload=st.binary(max_size=200))
def test_what_was_sealed_comes_back(payload: bytes) -> None:
    assert unseal(seal(payload), "here") == payload


@given(payload=st.binary(max_size=200), data=st.data())
def test_no_byte_can_differ_or_be_missing(payload: bytes, data: st.DataObject) -> None:
    chunk = bytearray(seal(payload))
    place = data.draw(st.integers(0, len(chunk) - 1))
    flipped = bytearray(chunk)
    flipped[place] ^= data.draw(st.integers(1, 255))
    for spoilt in (flipped, chunk[:place], chunk + b"\0"):
        with pytest.raises(StoreError, match="here: corrupt"):
            unseal(bytes(spoilt), "here")
