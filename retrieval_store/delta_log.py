"""Where learned texts are kept until they are folded into segments: a log for each namespace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Protocol, Self

from ..core.errors import StoreError
from ..core.types import Int32


def text_digest(tokens: Int32) -> str:
    """Name of a text: 32 hexadecimal digits; equal texts have equal names."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaEvent:
    """A text was learned, or proved useful.

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
    """What became of the events that left a log.

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
        """For `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> Self:
        """Raises `StoreError` naming `origin` for anything but what `to_json` gave."""
        try:
            fields = json.loads(text)
            return cls(**fields | {"garbage": tuple(fields["garbage"])})
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{origin}: corrupt; forget the namespace") from error


class DeltaLog(Protocol):
    """A bounded, expiring log of each namespace, for texts of one model.

    Every method raises `StoreError` if the store is out of reach. Readers keep what they have read
    for as long as a namespace's epoch stays the same, and read anew when it changes.
    """

    def append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        """Add events, in order, and tell those who wait for changes of the segment store.

        False, and nothing is added, where the store's `LearningPolicy` forbids it at that moment.
        """
        ...

    def epochs(self) -> dict[str, str]:
        """Namespace -> a mark that changes when events leave its log, or all of it."""
        ...

    def read(self, namespace: str, after: str = "") -> list[LoggedEvent]:
        """Events after the position `after`, oldest first; all of them by default."""
        ...

    def folded(self, namespace: str) -> Folded:
        """What the last fold said."""
        ...

    def fold(self, namespace: str, folded: Folded, up_to: str = "") -> None:
        """Set `folded` and drop events up to and with position `up_to`, at once for readers.

        Only under `locked`; raises `StoreError` if that lock was lost.
        """
        ...

    def locked(self, namespace: str) -> AbstractContextManager[bool]:
        """Whether nobody else folds or forgets the namespace until the context ends."""
        ...

    def close(self) -> None:
        """Free connections."""
        ...
