"""The pace of slices, of an engine that knows more of the simulated stages than real ones tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.request.chosen import RowAnswer
from ....core.speculation.step_cost import StepCost
from ....core.streaming.pace import SlicePace
from ....core.tree.streamed_tree import StreamedTree


class KnownPace(SlicePace):
    """Is told what the slowest stage takes, and goes by what steps take in full.

    It learns nothing of steps that are answered sooner than steps are, which are those that rows
    were left out of. The next slice will have all of its rows: if stages counted as quicker, it
    would go out before the first of them is free, knew less, and were more often in vain.
    """

    def __init__(
        self,
        cost: Callable[[], StepCost],
        num_stages: int,
        clock: Callable[[], float],
        slowest: float,
    ) -> None:
        """`slowest`: what the slowest stage takes of a step, by what the step takes in all."""
        super().__init__(cost, num_stages, clock)
        self._slowest_share = slowest

    def wants_spans(self) -> bool:
        """See `SlicePace`."""
        return False

    def answered(
        self, streams: Sequence[StreamedTree[RowAnswer]], num_rows: int, sent_at: float
    ) -> None:
        """See `SlicePace`."""
        if self._clock() - sent_at < self._seconds(num_rows):
            for stream in streams:
                stream.note_landing()
        else:
            super().answered(streams, num_rows, sent_at)
