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
# Nothing longer is written.
MAX_TOKENS = 4096
# Far above what one event gives, far below what would keep a text for ever.
MAX_EVENT_WEIGHT = 16.0
# Between two readings of a store's clock; this process's monotonic clock fills the gap.
READING_SECONDS = 60.0


def text_digest(tokens: Int32) -> str:
    """The name of a text: 32 hexadecimal digits; equal texts have equal names."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaEvent:
    """An event of a log: a text was learned, or was of use.

    digest  of the text
    weight  what this adds to the text's weight
    tokens  int32 [n]; None where the text is known by its digest
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
    """The record of a fold: where the events that left a log went.

    segment_id  the segment of the store that holds the texts; None: there is none yet
    time        when `weights` were taken, in seconds since the epoch
    weights     digest of a text -> its weight
    garbage     segments to delete: of a fold that ended, or that died before its end
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

        What a later version may add is left out.
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

    Raises `ValueError` unless it is one that a learner writes: anybody may have written it, or a
    disk or a network may have changed it.
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

    Every method raises `StoreError` if the store is out of reach, and `DamagedError` if only what
    it holds of one namespace cannot be read. Readers keep what they have read for as long as a
    namespace's epoch stays the same, and read anew when it changes.

    damage  counts what is damaged and was passed over
    """

    damage: DamageCount

    def now(self) -> float:
        """Seconds since the epoch, by the store's clock, which also gives events their times."""
        ...

    def append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        """Add events, in order, and tell those who wait for changes of the segment store.

        False, and nothing is added, where the store's `LearningPolicy` forbids it at that moment.
        """
        ...

    def epochs(self) -> dict[str, str]:
        """Namespace -> a mark that changes when events leave its log, or all of it."""
        ...

    def read(self, namespace: str, after: str = "") -> list[LoggedEvent]:
        """Events after the position `after`, oldest first: all, or so many that asking again for
        those after the last one is worth while."""
        ...

    def folded(self, namespace: str) -> Folded:
        """The record of the last fold; an empty one if that is damaged."""
        ...

    def fold(self, namespace: str, folded: Folded, up_to: str = "") -> None:
        """Set `folded` and drop events up to and with position `up_to`, at once for readers.

        Only under `locked`; raises `StoreError` if that lock was lost.
        """
        ...

    def locked(self, namespace: str) -> AbstractContextManager[bool]:
        """A context that holds the namespace's lock: whether nobody else folds or forgets it."""
        ...

    def close(self) -> None:
        """Free connections."""
        ...


class StoreClock:
    """Seconds since the epoch, whatever this process's own clock says.

    read  asks the store; raises `StoreError`. None: it has no clock, now at least, and this
          process's own is used
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
    damaged  what was passed over
    """

    entries: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)


def survey_logs(logs: Sequence[DeltaLog]) -> LogSurvey:
    """Count the entries of all logs, one for each model. Raises `StoreError` if out of reach."""
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
