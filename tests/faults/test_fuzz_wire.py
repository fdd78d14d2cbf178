"""Changed messages of every wire format; and that the search finds what is wrong."""

from __future__ import annotations

import random

import pytest
from draftline.core.errors import ProtocolError
from support.fuzz.wire_formats import Format, formats
from support.fuzz.wire_run import fuzz, mutated

FORMATS = {one.name: one for one in formats()}
# Over all formats, about 100,000 in the long form.
MESSAGES, ALL_MESSAGES = 200, 12_500


@pytest.mark.parametrize("count", [MESSAGES, pytest.param(ALL_MESSAGES, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_comes_is_read_or_refused(name: str, count: int) -> None:
    found = fuzz(FORMATS[name], count, seed=2)
    assert not found.faults
    assert found.num_read + sum(found.refused.values()) == count
    # The changes reach both ends.
    assert found.num_read > 0
    assert found.refused


def crash(data: bytes) -> object:
    return data[100]


def hoard(data: bytes) -> object:
    return bytes(2**25) if data != b"message" else None


def refuse(data: bytes) -> object:
    if data != b"message":
        raise ProtocolError("no message")
    return data


def test_what_is_wrong_is_found_and_kept_with_its_message() -> None:
    crashing = fuzz(Format("crashing", [bytes(200)], crash), 300, seed=1)
    assert 0 < crashing.num_faults < 300
    assert crashing.faults[0].startswith("IndexError: index out of range: 00")
    hoarding = fuzz(Format("hoarding", [b"message"], hoard), 20, seed=1)
    assert hoarding.num_faults > 0
    assert "took" in hoarding.faults[0]
    assert not fuzz(Format("refusing", [b"message"], refuse), 50, seed=1).num_faults


def test_a_seed_makes_the_same_messages_again() -> None:
    first, second, other = (
        [mutated([b"one message", b"another"], random.Random(seed)) for _ in range(1)]
        for seed in (1, 1, 2)
    )
    assert first == second != other
