"""Logs of learned texts, one for each namespace, until they are folded into segments."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from ...core.arrays import Int32
from ...core.errors import DamagedError
from ..store import SEGMENT_ID
from .damage import DamageCount

DIGEST = re.compile(r"[0-9a-f]{32}")
# Longest text that is written.
MAX_TOKENS = 4096
# Largest weight of an event: far above a real one, and too small to keep a text for ever.
MAX_EVENT_WEIGHT = 16.0
# Seconds between two readings of a store's clock; the monotonic clock measures the time between.
READING_SECONDS = 60.0


def text_digest(tokens: Int32) -> str:
    """The name of a text: 32 hexadecimal digits; equal texts have equal names."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaEvent:
    """An event of a log: a text was learned, or a learned text was used.

    digest  of the text
    weight added to the text's weight
    tokens  int32 [n]; None where only the digest is stored
    """

    digest: str
    weight: float
    tokens: Int32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoggedEvent:
    """An event with its place in the log, and its time in seconds since the epoch."""

    position: str
    time: float
    event: DeltaEvent


@dataclass(frozen=True, slots=True)
class Folded:
    """The record of a fold: the segment that received the events that left a log.

    segment_id  the segment of the store that holds the texts; None: there is none yet
    time        when `weights` were taken, in seconds since the epoch
    weights     digest of a text -> its weight
    garbage     segments to delete, left by a completed or an interrupted fold
    """

    segment_id: str | None = None
    time: float = 0.0
    weights: Mapping[str, float] = field(default_factory=dict)
    garbage: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The record as JSON text, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> Self:
        """Read what `to_json` wrote. Raises `DamagedError` naming `origin` for anything else.

        Fields that a later version may add are ignored.
        """
        try:
            fields = json.loads(text)
            weights = {_digest(name): _number(weight) for name, weight in fields["weights"].items()}
            garbage = tuple(_segment_id(name) for name in fields["garbage"])
            named = None if fields["segment_id"] is None else _segment_id(fields["segment_id"])
            return cls(named, _number(fields["time"]), weights, garbage)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{origin}: corrupt") from error


def checked_event(digest: object, weight: object, data: bytes | None) -> DeltaEvent:
    """An event from its fields in a log; `data` are its tokens' bytes.

    Raises `ValueError` unless it is valid: the data is untrusted and may be corrupt.
    """
    number = _number(weight)
    if not 0 < number <= MAX_EVENT_WEIGHT:
        raise ValueError("weight")
    if data is None:
        return DeltaEvent(_digest(digest), number)
    if len(data) > 4 * MAX_TOKENS:
        raise ValueError("length")
    tokens = np.frombuffer(data, "<i4").astype(np.int32)
    if text_digest(tokens) != digest:
        raise ValueError("digest")
    return DeltaEvent(_digest(digest), number, tokens)


def _digest(name: object) -> str:
    if not isinstance(name, str) or DIGEST.fullmatch(name) is None:
        raise ValueError("digest")
    return name


def _segment_id(name: object) -> str:
    if not isinstance(name, str) or SEGMENT_ID.fullmatch(name) is None:
        raise ValueError("segment id")
    return name


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("number")
    return float(value)


class DeltaLog(Protocol):
    """A bounded, expiring log of each namespace, for texts of one model.

    Every method raises `StoreError` if the store is out of reach, and `DamagedError` if only the
    data of one namespace cannot be read. Readers cache what they have read until the namespace's
    epoch changes, then read it again.

    damage  counts damaged entries, which are skipped
    """

    damage: DamageCount

    def now(self) -> float:
        """Seconds since the epoch, by the store's clock, which also gives events their times."""
        ...

    def append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        """Add events, in order, and notify readers that wait for changes of the segment store.

        Returns False, and adds nothing, if the store's `LearningPolicy` forbids it at that moment.
        """
        ...

    def epochs(self) -> dict[str, str]:
        """Namespace -> its epoch, a mark that changes when events are removed from its log."""
        ...

    def read(self, namespace: str, after: str = "") -> list[LoggedEvent]:
        """Events after the position `after`, oldest first: all, or a page that the caller continues
        after its last event."""
        ...

    def folded(self, namespace: str) -> Folded:
        """The record of the last fold; an empty one if that is damaged."""
        ...

    def fold(self, namespace: str, folded: Folded, up_to: str = "") -> None:
        """Set `folded` and drop the events up to and including position `up_to`, atomically for
        readers.

        Only under `locked`; raises `StoreError` if that lock was lost.
        """
        ...

    def locked(self, namespace: str) -> AbstractContextManager[bool]:
        """A context that tries to lock the namespace against other folds and erasures; gives
        whether it holds the lock."""
        ...

    def close(self) -> None:
        """Free connections."""
        ...


class StoreClock:
    """Seconds since the epoch by the store's clock, independent of this process's wall clock.

    read  reads the store's clock; raises `StoreError`. Its result None: the store has no clock now,
          and this process's clock is used
    """

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self._changing = threading.Lock()
        self._read_at = float("-inf")
        self._ahead = 0.0

    def now(self) -> float:
        """Seconds since the epoch. Raises `StoreError` if the store is out of reach."""
        with self._changing:
            if time.monotonic() - self._read_at > READING_SECONDS:
                seconds = self._read()
                if seconds is None:
                    return time.time()
                self._ahead = seconds - time.monotonic()
                self._read_at = time.monotonic()
            return time.monotonic() + self._ahead


@dataclass(frozen=True, slots=True)
class LogSurvey:
    """Counts by namespace, those of 0 left out.

    entries  texts, and credits to texts, that are not folded yet
    damaged  skipped entries
    """

    entries: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)


def survey_logs(logs: Sequence[DeltaLog]) -> LogSurvey:
    """Count the entries of all models' logs. Raises `StoreError` if the store is out of reach."""
    survey = LogSurvey()
    for log in logs:
        for namespace in log.epochs():
            try:
                survey.entries[namespace] += len(log.read(namespace))
                log.folded(namespace)
            except DamagedError:
                log.damage.add(namespace, "log")
            survey.damaged[namespace] += log.damage.of(namespace)
    return LogSurvey(+survey.entries, +survey.damaged)
