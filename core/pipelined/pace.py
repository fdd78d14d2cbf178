"""When the next chunk of a pipelined tree goes out, and how often its output leaves the tree.

Stages take chunks one after the other. Earlier than the slowest stage is free a chunk would only
know less, and chunks in vain would gather before that stage, where the next root waits behind
them. A chunk that is in a stage as an output comes, which may say that all of it is in vain, keeps
the next root waiting; so where that output is near, only a chunk that will probably be right goes
out before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..arrays import Span
from ..speculation.step_cost import StepCost
from .tree import PipelinedTree

# What one more run leaves of the weight of those before it.
DECAY = 0.98
# Of outputs at leaves, those that must have ended a run for heads to draft there.
LEAF_SHARE = 0.5


class Misses:
    """Counts runs of pipelined trees, recent ones more: a run begins where no chunk of a request's
    tree is in flight, and ends where that is so again, with a miss or because drafts end."""

    __slots__ = ("_ended", "_outputs")

    def __init__(self) -> None:
        # Outputs at leaves, and those of them that ended a run.
        self._outputs = self._ended = 0.0

    def note(self, at_leaf: Sequence[bool]) -> None:
        """A run is over. `at_leaf`: of each of its outputs, whether the text came to a leaf."""
        self._outputs = DECAY * self._outputs + sum(at_leaf)
        self._ended = DECAY * self._ended + at_leaf[-1]

    @property
    def at_leaves(self) -> bool:
        """Whether heads draft behind leaves: most runs that came to one ended there."""
        return self._ended + 1.0 >= LEAF_SHARE * (self._outputs + 1.0)


# Weight of the newest chunk in the mean time from its planning to its start.
LEAD_WEIGHT = 0.1
# No wait is worth less than this; clocks and timers are no finer.
LEAST_WAIT_S = 1e-5
# Weight of the newest output in how much longer steps take than expected, and its bounds.
SLOWNESS_WEIGHT, LEAST_SLOWNESS, MOST_SLOWNESS = 0.1, 0.25, 16.0
# Stages say how long they work on the first chunks, and on one of so many then; the newest one's
# weight in what the slowest of them takes.
FIRST_TIMED, TIMED_EVERY, SPAN_WEIGHT = 4, 16, 0.25


class ChunkPace:
    """Knows when steps were sent, and expects of stages what steps have cost, and how much longer
    chunks have taken of late: rounds are what costs are learned from.

    What the slowest stage takes is what stages say of some chunks.
    """

    __slots__ = (
        "_clock", "_cost", "_free_at", "_lead_s", "_num_chunks", "_slowest_share", "_slowness",
        "_stage_s", "_turn_at", "num_stages",
    )  # fmt: skip

    def __init__(
        self, cost: Callable[[], StepCost], num_stages: int, clock: Callable[[], float]
    ) -> None:
        self._cost = cost
        self._clock = clock
        self.num_stages = num_stages
        # When the slowest stage, if it were the first, has computed all that was sent, and what the
        # last step took it.
        self._free_at = self._stage_s = 0.0
        # What it takes of a step, by what the step costs; None: not measured yet.
        self._slowest_share: float | None = None
        # Steps with chunks that were sent.
        self._num_chunks = 0
        # From a chunk's planning, drafters' time included, until it is sent.
        self._lead_s = 0.0
        self._slowness = 1.0
        # When a request that waits may send.
        self._turn_at: float | None = None

    def sent(
        self,
        pipelined_trees: Sequence[PipelinedTree],
        num_rows: int,
        planned_at: float | None,
    ) -> None:
        """A step went out, with chunks of these trees, whose nodes have KV positions by now."""
        now, expected_s = self._clock(), self._seconds(num_rows)
        round_s = self._slowness * expected_s
        begins_at = max(now, self._free_at)
        share = self._slowest_share
        self._stage_s = round_s / self.num_stages if share is None else share * expected_s
        self._free_at = begins_at + self._stage_s
        self._num_chunks += bool(pipelined_trees)
        if pipelined_trees and planned_at is not None:
            self._lead_s += LEAD_WEIGHT * (now - planned_at - self._lead_s)
        for pipelined in pipelined_trees:
            pipelined.note_flight(begins_at + round_s)

    def finished(
        self, pipelined_trees: Sequence[PipelinedTree], num_rows: int, sent_at: float
    ) -> None:
        """A step with chunks of these trees has finished."""
        for pipelined in pipelined_trees:
            pipelined.note_landing()
        if pipelined_trees and (expected_s := self._seconds(num_rows)) > 0:
            slowness = (self._clock() - sent_at) / expected_s
            slowness = min(max(slowness, LEAST_SLOWNESS), MOST_SLOWNESS)
            self._slowness += SLOWNESS_WEIGHT * (slowness - self._slowness)

    @property
    def stage_s(self) -> float:
        """Seconds that the slowest stage took for the last step; infinite before the first one."""
        return self._stage_s or math.inf

    def wants_spans(self) -> bool:
        """Whether stages are to say how long they work on the chunks that go out next."""
        return self._num_chunks < FIRST_TIMED or self._num_chunks % TIMED_EVERY == 0

    def note_spans(self, spans: Sequence[Span], num_rows: int) -> None:
        """What stages said of a step, a span of each."""
        slowest_s, expected_s = max(end - begin for begin, end in spans), self._seconds(num_rows)
        if expected_s > 0 and slowest_s > 0:
            # No pause of a stage counts for more than a whole step.
            share = min(slowest_s / expected_s, 1.0)
            before = share if self._slowest_share is None else self._slowest_share
            self._slowest_share = before + SPAN_WEIGHT * (share - before)

    def is_turn(self, pipelined: PipelinedTree, value: float) -> bool:
        """Whether a chunk may be planned now, whose best node has this `value`.

        If not, `take_delay` says when to ask again, unless an output comes first.
        """
        now = self._clock()
        if self._free_at - self._lead_s > now + LEAST_WAIT_S:
            turn_at = self._free_at - self._lead_s
            self._turn_at = turn_at if self._turn_at is None else min(turn_at, self._turn_at)
            return False
        begins_at = max(now + self._lead_s, self._free_at)
        due_at = pipelined.next_output_at()
        # Of the next root's time, if the chunk is in vain.
        lost_s = begins_at + self._stage_s - due_at
        return lost_s <= 0 or value * max(due_at - begins_at, 0.0) > (1 - value) * lost_s

    def take_delay(self) -> float | None:
        """Seconds until the first request that waits has its turn; None: none waits."""
        turn_at, self._turn_at = self._turn_at, None
        return None if turn_at is None else max(0.0, turn_at - self._clock())

    def _seconds(self, num_rows: int) -> float:
        """What a step of so many rows takes all stages, as far as costs tell."""
        return float(self._cost().seconds(1, num_rows))
