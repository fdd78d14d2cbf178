"""What a drafter hands on when a request ends, for stores that learn from answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .types import Int32


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The end of a prompt and the answer to it.

    namespace  whose text it is; only lookups of this namespace may ever read it
    tokens     int32 [n]  the prompt's last tokens and the answer's
    accepted   (start, stop) in `tokens`: runs that the store had proposed and the target took
    """

    namespace: str
    tokens: Int32
    accepted: tuple[tuple[int, int], ...] = ()


class Learner(Protocol):
    """Takes ended requests; never blocks and raises nothing."""

    def learn(self, ended: Ended) -> None:
        """Take it, or drop it and count that."""
        ...
