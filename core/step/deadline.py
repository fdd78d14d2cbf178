"""How long a step may take before its pipeline counts as hung."""

from __future__ import annotations

# A step that takes so many times what steps take now and then is no slow step any more.
SLOWEST = 20.0
# Weight of the newest step.
WEIGHT = 0.05
# Share of a step that is waited for what only some of its requests need, and its bounds, seconds.
PATIENCE = 0.05
LEAST_PATIENCE_S, MOST_PATIENCE_S = 0.0005, 0.02


class StepDeadline:
    """Follows how long steps take. It knows no clock."""

    __slots__ = ("_floor_s", "_mean_s", "_peak_s")

    def __init__(self, floor_s: float) -> None:
        """`floor_s`: no step counts as hung before; its setting is `step_timeout_s`."""
        self._floor_s = floor_s
        self._mean_s = self._peak_s = 0.0

    def record(self, seconds: float) -> None:
        """Learn that a step took this many seconds."""
        weight = WEIGHT if self._mean_s else 1.0
        self._mean_s += weight * (seconds - self._mean_s)
        # Falls back slowly: long prompts come now and then.
        self._peak_s = max(seconds, self._peak_s + WEIGHT * (self._mean_s - self._peak_s))

    @property
    def limit_s(self) -> float:
        """Seconds after which a step that has no answer is lost."""
        return max(self._floor_s, SLOWEST * self._peak_s)

    @property
    def patience_s(self) -> float:
        """Seconds that a step may wait for some of its requests, so that the others lose little."""
        return min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, PATIENCE * self._mean_s))
