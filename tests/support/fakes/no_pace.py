"""Chunks that go out whenever they are wanted, for engines without a clock."""

from __future__ import annotations

from draftline.core.pipelined.pace import ChunkPace
from draftline.core.pipelined.tree import PipelinedTree
from draftline.core.speculation.step_cost import StepCost


class NoPace(ChunkPace):
    """It is always a chunk's turn."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(lambda: StepCost([1], [1.0]), max(1, num_groups - 1), lambda: 0.0)

    def is_turn(self, pipelined: PipelinedTree, value: float) -> bool:
        return True
