"""Reads mutated messages, and counts what becomes of them."""

from __future__ import annotations

import random
import resource
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from draftline.core.errors import DrafterError, DraftlineError
from support.fuzz.wire_formats import Format

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


MAX_SECONDS = 5.0
# Faults that are kept, and bytes of their messages; more are counted.
KEPT, KEPT_BYTES = 20, 4096
# What gRPC's servers and clients here take for bytes that are no message, besides errors of ours.
REFUSALS = (DraftlineError,)


@dataclass(slots=True)
class WireFindings:
    """What mutated messages of one format did.

    refused      an error of draftline's own
    faults       any other error, or more memory or time than a message may take
    peak_bytes   most that reading one took of Python's and numpy's memory
    slowest_s    longest that reading one took
    grown_bytes  by how much the process grew over all of them
    """

    name: str
    num_messages: int = 0
    num_read: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    num_faults: int = 0
    faults: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    slowest_s: float = 0.0
    grown_bytes: int = 0

    def add_fault(self, what: str, data: bytes) -> None:
        """Count one, and keep it with its message if there are few."""
        self.num_faults += 1
        if len(self.faults) < KEPT:
            self.faults.append(f"{what}: {data[:KEPT_BYTES].hex()}")


def fuzz(fmt: Format, count: int, seed: int) -> WireFindings:
    """Read so many mutated messages of a format; the same seed makes the same ones."""
    found = WireFindings(fmt.name, count)
    for message in fmt.messages:
        # One of them tells of a drafter's own error.
        with suppress(DrafterError):
            fmt.read(message)
    rng = random.Random(f"{seed} {fmt.name}")
    before = _resident()
    tracemalloc.start()
    try:
        for _ in range(count):
            _read(fmt, mutated(fmt.messages, rng), found)
    finally:
        tracemalloc.stop()
    found.grown_bytes = max(0, _resident() - before)
    return found


def _read(fmt: Format, data: bytes, found: WireFindings) -> None:
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    start = time.perf_counter()
    try:
        fmt.read(data)
        found.num_read += 1
    except REFUSALS as error:
        name = type(error).__name__
        found.refused[name] = found.refused.get(name, 0) + 1
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        found.add_fault(f"{type(error).__name__}: {error}", data)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1] - held
    if peak > fmt.max_memory:
        found.add_fault(f"took {peak} bytes", data)
    if seconds > MAX_SECONDS:
        found.add_fault(f"took {seconds:.1f} s", data)
    found.peak_bytes = max(found.peak_bytes, peak)
    found.slowest_s = max(found.slowest_s, seconds)


def _resident() -> int:
    """Most memory that the process had so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
