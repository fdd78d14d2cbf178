"""The steps of one request on their way: which of them overlap, and what the text left of them."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.errors import ConfigError
from ....core.step.trace import SliceCounts, StepRecord
from .bars import Bar

# Beyond them the picture says no more.
MAX_LANES = 16


def flight_lanes(records: Sequence[StepRecord], request: int) -> dict[str, list[Bar]]:
    """Lanes of flights that do not overlap, with a bar from each step's submission to its answer.

    The first part of a bar stands for nodes that the text had left when they were answered.
    Raises `ConfigError` where no step holds a slice of that request.
    """
    start = records[0].planned_at
    lanes: list[list[Bar]] = []
    ends: list[float] = []
    for record in records:
        own = [counts for counts in record.slices if counts.request == request]
        if not own:
            continue
        free = [lane for lane, end in enumerate(ends) if end <= record.submitted_at]
        lane = free[0] if free else len(lanes)
        if lane == len(lanes):
            lanes.append([])
            ends.append(0.0)
        ends[lane] = record.answered_at
        lanes[lane] += _bars(record, own[0], record.submitted_at - start)
    if not lanes:
        known = sorted({counts.request for record in records for counts in record.slices})
        told = ", ".join(map(str, known[:8])) or "none"
        raise ConfigError("request", f"no step holds a slice of {request}; some do of: {told}")
    return {f"flight {number}": bars for number, bars in enumerate(lanes[:MAX_LANES], 1)}


def _bars(record: StepRecord, counts: SliceCounts, begin: float) -> list[Bar]:
    length = record.answered_at - record.submitted_at
    killed = length * counts.killed / max(counts.nodes, 1)
    bars = [Bar(begin, killed, "killed")] if killed else []
    return [*bars, Bar(begin + killed, length - killed, "slice", str(record.step))]
