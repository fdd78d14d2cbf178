"""When each stage computes a step, one step after the other, and with how many of its rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ....core.arrays import Span
from ....measure.simulate.cost_profile import CostProfile

# The profile whose rows these are, by default.
PROFILE = "70b-8-h200"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage for a step, for each of its rows beside, and of a message.

    is_pruned  whether the engine tells each stage which rows an answer has made vain, with a
               message of its own: a stage that begins the step later leaves these out, and where
               no row is left it takes no time
    last_s     seconds that the last stage takes longer for a step
    is_slowest_known  whether the engine is told what the slowest stage takes; else it learns that
    """

    stage_s: float
    row_s: float
    hop_s: float
    is_pruned: bool = False
    last_s: float = 0.0
    is_slowest_known: bool = False

    def seconds(self, num_rows: int, *, is_last: bool) -> float:
        """What so many rows of a step take a stage."""
        more_s = self.last_s if is_last else 0.0
        return self.stage_s + more_s + self.row_s * num_rows if num_rows else 0.0

    def slowest(self, num_stages: int) -> float:
        """A step's time in the last stage, by that of its way through all, messages included; rows
        are left aside."""
        last_s = self.stage_s + self.last_s
        return last_s / ((num_stages - 1) * self.stage_s + last_s + (num_stages + 1) * self.hop_s)


@dataclass(frozen=True, slots=True)
class Passage:
    """A step on its way.

    spans        when each stage computed it
    rows         how many rows each stage computed
    answered_at  when the engine has the answer, seconds
    waited_s     for how long it lay in front of stages that computed other steps, in all
    """

    spans: tuple[Span, ...]
    rows: tuple[int, ...]
    answered_at: float
    waited_s: float


class StageLine:
    """Stages, each of which takes steps in order and one at a time."""

    __slots__ = ("_free_at", "_times")

    def __init__(self, num_stages: int, times: StageTimes) -> None:
        self._times = times
        self._free_at = [0.0] * num_stages

    def send(self, sent_at: float, num_rows: int, vain_at: Sequence[float]) -> Passage:
        """Send a step of so many rows.

        vain_at: when the engine knew of rows of the step that they are in vain, seconds. A step
                 that has none left goes through all the same: answers stay in order
        """
        times, known_at = self._times, sorted(vain_at)
        arrives, waited_s, last = sent_at + times.hop_s, 0.0, len(self._free_at) - 1
        spans: list[Span] = []
        rows: list[int] = []
        for stage, free_at in enumerate(self._free_at):
            begin = max(arrives, free_at)
            waited_s += begin - arrives
            num_vain = bisect_right(known_at, begin - times.hop_s) if times.is_pruned else 0
            rows.append(num_rows - num_vain)
            self._free_at[stage] = end = begin + times.seconds(rows[-1], is_last=stage == last)
            spans.append((begin, end))
            arrives = end + times.hop_s
        return Passage(tuple(spans), tuple(rows), arrives, waited_s)


def row_seconds(profile: CostProfile) -> float:
    """What a row computes in one of a profile's stages."""
    operations = profile.device.operations * profile.device.operations_share
    return profile.target.operations / profile.num_stages / operations
