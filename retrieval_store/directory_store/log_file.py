"""The file of a namespace's log in a folder: lines with checksums, so damage costs one line.

Each line is the CRC-32 of the rest, 8 hexadecimal digits, a space, and JSON:

    {"epoch", "next"}                          first: the mark of readers, and the next position
    {"folded"}                                 `Folded`, as text
    [position, time, digest, weight, tokens]   an event; tokens are base64 of int32, or null

Older versions wrote one JSON object without a checksum, which is read.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import DamagedError
from ..delta.delta_log import Folded, LoggedEvent, checked_event

# The errors of reading anything but the expected JSON.
UNSOUND = (ValueError, KeyError, TypeError, AttributeError, RecursionError, DamagedError)


@dataclass(frozen=True, slots=True)
class LogContent:
    """The content of a log file.

    damaged  names of the skipped lines
    lines    line -> its event, so that the next read does not decode it again
    """

    epoch: str
    next_position: int = 1
    folded: Folded = field(default_factory=Folded)
    events: tuple[LoggedEvent, ...] = ()
    damaged: tuple[str, ...] = ()
    lines: Mapping[bytes, LoggedEvent] = field(default_factory=dict)


def encode_log(content: LogContent) -> bytes:
    """The bytes of a log file, for `decode_log`."""
    rows: list[object] = [{"epoch": content.epoch, "next": content.next_position}]
    rows.append({"folded": content.folded.to_json()})
    rows += [_event_row(logged) for logged in content.events]
    return b"".join(_line(json.dumps(row).encode()) for row in rows)


def decode_log(data: bytes, origin: str, known: Mapping[bytes, LoggedEvent]) -> LogContent:
    """The valid content of a file of either format; `known` are the `lines` of an earlier read.

    `origin` names the file in the `DamagedError` raised where nothing can be read.
    """
    if data.startswith(b"{"):
        return _decode_older(data, origin)
    decoder = _Decoder(origin, known)
    for line in data.removesuffix(b"\n").split(b"\n"):
        decoder.add(line)
    return decoder.content(data)


def _line(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _sum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


class _Decoder:
    """Decodes a log file line by line."""

    def __init__(self, origin: str, known: Mapping[bytes, LoggedEvent]) -> None:
        self._origin = origin
        self._known = known
        self._lines: dict[bytes, LoggedEvent] = {}
        self._epoch = ""
        self._next = 1
        self._folded: Folded | None = None
        self._events: list[LoggedEvent] = []
        self._damaged: list[str] = []

    def add(self, line: bytes) -> None:
        """Decode one line, valid or damaged."""
        event = self._known.get(line)
        try:
            event = event or self._decoded(line)
        except UNSOUND:
            self._damaged.append(f"line {_sum(line)}")
        if event is not None:
            self._lines[line] = event
            self._events.append(event)

    def content(self, data: bytes) -> LogContent:
        """The content of the log file `data`, after `add` was called for all its lines."""
        last = max((int(logged.position) for logged in self._events), default=0)
        return LogContent(
            # A new epoch, so that readers read the log again.
            self._epoch or f"damaged {_sum(data)}",
            max(self._next, last + 1),
            self._folded or Folded(),
            tuple(self._events),
            tuple(self._damaged) or (() if self._epoch else ("head",)),
            self._lines,
        )

    def _decoded(self, line: bytes) -> LoggedEvent | None:
        digits, _, text = line.partition(b" ")
        if digits.decode() != _sum(text):
            raise ValueError("checksum")
        row = json.loads(text.decode())
        if isinstance(row, list):
            return _event(row)
        if "folded" in row:
            self._folded = Folded.from_json(row["folded"], self._origin)
        else:
            self._epoch, self._next = str(row["epoch"]), int(row["next"])
        return None


def _decode_older(data: bytes, origin: str) -> LogContent:
    damaged: list[str] = []
    events: list[LoggedEvent] = []
    folded = Folded()
    try:
        fields = json.loads(data)
        rows: Sequence[Any] = list(fields["events"])
        epoch, following = str(fields["epoch"]), int(fields["next"])
    except UNSOUND:
        return LogContent(f"damaged {_sum(data)}", damaged=(f"file {_sum(data)}",))
    try:
        folded = Folded.from_json(fields["folded"], origin)
    except UNSOUND:
        damaged.append("folded")
    for index, row in enumerate(rows):
        try:
            events.append(_event(row))
        except UNSOUND:
            damaged.append(f"event {index}")
    return LogContent(epoch, following, folded, tuple(events), tuple(damaged))


def _event_row(logged: LoggedEvent) -> list[Any]:
    event = logged.event
    packed = None
    if event.tokens is not None:
        packed = base64.b64encode(event.tokens.astype("<i4").tobytes()).decode()
    return [logged.position, logged.time, event.digest, event.weight, packed]


def _event(row: Any) -> LoggedEvent:
    position, time, digest, weight, packed = row
    if not isinstance(position, str) or len(position) != 16 or not position.isdecimal():
        raise ValueError("position")
    if not math.isfinite(time):
        raise ValueError("time")
    data = None if packed is None else base64.b64decode(packed, validate=True)
    return LoggedEvent(position, float(time), checked_event(digest, weight, data))
