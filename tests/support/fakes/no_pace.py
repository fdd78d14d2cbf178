"""Slices that go out whenever they are wanted, for engines without a clock."""

from __future__ import annotations

from draftline.core.request.chosen import RowAnswer
from draftline.core.speculation.step_cost import StepCost
from draftline.core.streaming.pace import SlicePace
from draftline.core.tree.streamed_tree import StreamedTree


class NoPace(SlicePace):
    """It is always a slice's turn."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(lambda: StepCost([1], [1.0]), max(1, num_groups - 1), lambda: 0.0)

    def is_turn(self, stream: StreamedTree[RowAnswer], value: float) -> bool:
        return True
