"""The clock of a drafter in simulated time, whose passes take as long as in a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class PassCounter(Protocol):
    """A drafter that counts its models' passes and times them by a clock, in seconds. The clock can
    be replaced to simulate other times."""

    clock: Callable[[], float]

    @property
    def num_passes(self) -> int: ...  # noqa: D102 - see the class


class DraftClock:
    """The simulation's time; during a draft, its start plus the time of its passes so far.

    So stopping rules, tree shapes and deadlines follow the profile's times.
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
        """Start a draft; the simulation's time is paused."""
        self._passes_before = self._num_passes()

    def end(self) -> None:
        """End the draft; the simulation then waits for its time."""
        self._passes_before = None

    def __call__(self) -> float:
        """Seconds."""
        if self._passes_before is None:
            return self._clock()
        return self._clock() + (self._num_passes() - self._passes_before) * self._pass_s
