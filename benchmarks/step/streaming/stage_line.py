"""When each stage computes a step, one step after the other, and with how many of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from ....core.arrays import Span
from ....measure.simulate.cost_profile import CostProfile

# The profile whose rows these are, by default.
PROFILE = "70b-8-h200"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage for a step, for each of its rows beside, and of a message."""

    stage_s: float
    row_s: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class Passage:
    """A step on its way.

    spans        when each stage computed it
    answered_at  when the engine has the answer, seconds
    """

    spans: tuple[Span, ...]
    answered_at: float


class StageLine:
    """Stages, each of which takes steps in order and one at a time."""

    __slots__ = ("_free_at", "_times")

    def __init__(self, num_stages: int, times: StageTimes) -> None:
        self._times = times
        self._free_at = [0.0] * num_stages

    def send(self, sent_at: float, num_rows: int) -> Passage:
        """Send a step of so many rows."""
        times, arrives = self._times, sent_at + self._times.hop_s
        spans: list[Span] = []
        for stage, free_at in enumerate(self._free_at):
            begin = max(arrives, free_at)
            self._free_at[stage] = end = begin + times.stage_s + times.row_s * num_rows
            spans.append((begin, end))
            arrives = end + times.hop_s
        return Passage(tuple(spans), arrives)


def row_seconds(profile: CostProfile) -> float:
    """What a row computes in one of a profile's stages."""
    operations = profile.device.operations * profile.device.operations_share
    return profile.target.operations / profile.num_stages / operations
