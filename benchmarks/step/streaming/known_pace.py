"""The pace of slices, of an engine that knows more of the simulated stages than real ones tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.request.chosen import RowAnswer
from ....core.schedule.pace import SlicePace
from ....core.schedule.step_cost import StepCost
from ....core.tree.streamed_tree import StreamedTree


class KnownPace(SlicePace):
    """Sends slices as the slowest stage gets free, and goes by what steps take in full.

    It learns nothing of steps that are answered sooner than steps are, which are those that rows
    were left out of. The next slice will have all of its rows: if stages counted as quicker, it
    would go out before the first of them is free, knew less, and were more often in vain.
    """

    __slots__ = ("_slowest",)

    def __init__(
        self,
        cost: Callable[[], StepCost],
        num_stages: int,
        clock: Callable[[], float],
        slowest: float = 1.0,
    ) -> None:
        """`slowest`: the time of the slowest stage, by the mean of all; 1 goes by the mean."""
        super().__init__(cost, num_stages, clock)
        self._slowest = slowest

    def sent(
        self, streams: Sequence[StreamedTree[RowAnswer]], num_rows: int, planned_at: float | None
    ) -> None:
        """See `SlicePace`."""
        begins_at = max(self._clock(), self._free_at)
        super().sent(streams, num_rows, planned_at)
        self._stage_s *= self._slowest
        self._free_at = begins_at + self._stage_s

    def answered(
        self, streams: Sequence[StreamedTree[RowAnswer]], num_rows: int, sent_at: float
    ) -> None:
        """See `SlicePace`."""
        if self._clock() - sent_at < self._seconds(num_rows):
            for stream in streams:
                stream.note_landing()
        else:
            super().answered(streams, num_rows, sent_at)
