"""Makes of messages others that are none, or none that anybody would write."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

# How many changes a message gets; few of them leave it a message, which is read to its end.
CHANGE_COUNTS = (1, 1, 1, 2, 3, 4)
MAX_PART = 64
# Largest and smallest numbers of both encodings, lengths of gigabytes, msgpack's tags of arrays,
# maps, texts and bytes with 32 bits of length, deep nesting, half of a surrogate.
NASTY = (
    b"\xff" * 4, b"\xff" * 9 + b"\x01", b"\x80" * 9 + b"\x01", b"\x7f\xff\xff\xff", b"\0" * 8,
    b"\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdb\x7f\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7,
    b"\xcb\x7f\xf0" + b"\0" * 6, b"\xc0", b"\xc1", b"\x90", b"\x81\x90\x90", b"\x91" * MAX_PART,
    b"\xed\xa0\x80",
)  # fmt: skip


def mutated(messages: Sequence[bytes], rng: random.Random) -> bytes:
    """One of the messages with one to four changes."""
    data = bytearray(rng.choice(messages))
    for _ in range(rng.choice(CHANGE_COUNTS)):
        rng.choice(CHANGES)(data, messages, rng)
    return bytes(data)


def _place(data: bytearray, rng: random.Random) -> int:
    return rng.randint(0, len(data))


def _part(data: Sequence[int], rng: random.Random) -> slice:
    start = rng.randint(0, len(data))
    return slice(start, start + rng.randint(1, MAX_PART))


def _flip(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _drop(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    del data[_part(data, rng)]


def _cut(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    del data[_place(data, rng) :]


def _repeat(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    place = _place(data, rng)
    data[place:place] = data[_part(data, rng)]


def _splice(data: bytearray, messages: Sequence[bytes], rng: random.Random) -> None:
    """A part of another message in the place of one of this."""
    other = rng.choice(messages)
    data[_part(data, rng)] = other[_part(other, rng)]


def _insert_nasty(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    place = _place(data, rng)
    data[place:place] = rng.choice(NASTY)


def _overwrite_nasty(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    value, place = rng.choice(NASTY), _place(data, rng)
    data[place : place + len(value)] = value


Change = Callable[[bytearray, Sequence[bytes], random.Random], None]
CHANGES: tuple[Change, ...] = (
    _flip, _flip, _flip, _set, _set, _drop, _cut, _repeat, _splice, _insert_nasty, _overwrite_nasty,
)  # fmt: skip
