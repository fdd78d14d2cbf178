"""The time as a drafter would read it whose passes took as long as those of a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class PassCounter(Protocol):
    """A drafter that counts the passes of its models, and reads from a clock, seconds, how long
    they take; whoever sets another one makes it follow other times."""

    clock: Callable[[], float]

    @property
    def num_passes(self) -> int: ...  # noqa: D102 - see the class


class DraftClock:
    """The simulation's time; during a draft, when it began and what its passes since take.

    So stopping rules and shapes follow the profile's times, and deadlines end what it would end.
    """

    def __init__(
        self, clock: Callable[[], float], pass_s: float, num_passes: Callable[[], int]
    ) -> None:
        """`clock`: of the simulation; `pass_s`: of a pass; `num_passes`: of the drafter so far."""
        self._clock = clock
        self._pass_s = pass_s
        self._num_passes = num_passes
        self._passes_before: int | None = None

    def begin(self) -> None:
        """A draft begins; the simulation's time stands still."""
        self._passes_before = self._num_passes()

    def end(self) -> None:
        """It is done; its time is waited for."""
        self._passes_before = None

    def __call__(self) -> float:
        """Seconds."""
        if self._passes_before is None:
            return self._clock()
        return self._clock() + (self._num_passes() - self._passes_before) * self._pass_s
