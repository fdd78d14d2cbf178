"""What a drafter hands on when a request ends, for stores that learn from answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .arrays import Int32

# What becomes of an ended request. It is `learned`, or `repeated`: known as a whole already. Or it
# is refused: `shared` is everybody's, `salted` has a cache salt, `unstored` has store: false, `off`
# is of a namespace that is not learned, `unfit` of another length or vocabulary. Or it is lost:
# `dropped` where too many waited, `failed` with its store.
OUTCOMES = (
    "learned", "repeated", "shared", "salted", "unstored", "off", "unfit", "dropped", "failed",
)  # fmt: skip
# Counted beside them: texts that gained weight, because an ended request took what they say.
CREDITED = "credited"
# And entries of the store's logs that were passed over because they are damaged.
DAMAGED = "damaged"


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

    @property
    def counts(self) -> Mapping[str, int]:
        """How many had which of `OUTCOMES` so far, `CREDITED` and `DAMAGED`; what is 0 may be left
        out."""
        ...

    def learn(self, ended: Ended) -> None:
        """Take it, or drop it and count that."""
        ...


@runtime_checkable
class LearningDrafter(Protocol):
    """A drafter that hands ended requests to a learner."""

    @property
    def learning_counts(self) -> Mapping[str, int]:
        """As `Learner.counts`, with what it refused by itself; empty where it learns nothing. May
        be read in another thread."""
        ...
