"""When chunks go out, by a clock that the tests set."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from draftline.core.arrays import Span
from draftline.core.pipelined.pace import ChunkPace
from draftline.core.pipelined.tree import PipelinedNode, PipelinedTree
from draftline.core.speculation.step_cost import StepCost

STAGE_S, STAGES = 1.0, 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> ChunkPace:
    """Steps take all stages together 8 s, whatever is in them."""
    return ChunkPace(lambda: StepCost([1], [STAGES * STAGE_S]), STAGES, clock)


def sent(pace: ChunkPace, *values: float) -> PipelinedTree:
    """A tree whose root and nodes, one behind the other, went out just now."""
    pipelined = PipelinedTree(7, 10)
    nodes: list[PipelinedNode] = []
    for depth, value in enumerate(values, 1):
        parent = nodes[-1] if nodes else pipelined.root
        node = PipelinedNode(depth, parent.position + 1, 0, parent)
        node.value = value
        parent.children[depth] = node
        nodes.append(node)
    pipelined.place_kv(nodes)
    pace.sent([pipelined], 1 + len(nodes), planned_at=None)
    return pipelined


def test_a_slice_waits_for_the_first_stage(pace: ChunkPace, clock: Clock) -> None:
    pipelined = sent(pace, 0.9)
    assert not pace.is_turn(pipelined, 0.9)
    assert pace.take_delay() == pytest.approx(STAGE_S)
    assert pace.take_delay() is None
    clock.now = STAGE_S
    assert pace.is_turn(pipelined, 0.9)
    assert pace.take_delay() is None


def test_others_keep_the_first_stage_busy_too(pace: ChunkPace, clock: Clock) -> None:
    pipelined = sent(pace, 0.9)
    pace.sent([], 5, planned_at=None)
    clock.now = STAGE_S
    assert not pace.is_turn(pipelined, 0.9)
    assert pace.take_delay() == pytest.approx(STAGE_S)


@pytest.mark.parametrize(
    ("now", "value", "expected"),
    [
        # In the first stage until the answer comes: nobody waits for it.
        (7.0, 0.01, True),
        # For half a stage: worth it if it is more often right than not.
        (7.5, 0.4, False),
        (7.5, 0.6, True),
        # Nearly nothing is gained by not waiting.
        (7.9, 0.8, False),
        # The answer is overdue: there is nothing to be early for.
        (8.5, 0.99, False),
    ],
)
def test_what_may_be_in_vain_stays_out_of_the_next_root_s_way(
    pace: ChunkPace, clock: Clock, now: float, value: float, expected: bool
) -> None:
    pipelined = sent(pace, 0.9)
    clock.now = now
    assert pace.is_turn(pipelined, value) is expected


def test_answers_about_dropped_nodes_tell_nothing(pace: ChunkPace, clock: Clock) -> None:
    pipelined = sent(pace, 0.9)
    assert pipelined.next_output_at() == pytest.approx(STAGES * STAGE_S)
    [node] = pipelined.alive()
    node.is_alive, pipelined.root.target = False, 3
    assert math.isinf(pipelined.next_output_at())
    clock.now = 7.9
    assert pace.is_turn(pipelined, 0.01)


def test_answers_are_expected_when_slices_of_late_were_answered(
    pace: ChunkPace, clock: Clock
) -> None:
    for _ in range(100):
        sent_at = clock.now
        pipelined = sent(pace, 0.9)
        clock.now += 3 * STAGES * STAGE_S
        pace.finished([pipelined], 2, sent_at)
        assert math.isinf(pipelined.next_output_at())
    pipelined = sent(pace, 0.9)
    due_at = clock.now + 3 * STAGES * STAGE_S
    assert pipelined.next_output_at() == pytest.approx(due_at, rel=0.01)
    clock.now += 3 * STAGE_S
    assert pace.is_turn(pipelined, 0.9)


def test_planning_begins_as_much_earlier_as_it_takes(pace: ChunkPace, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 100.0
        sent_at = clock.now
        pipelined = PipelinedTree(7, 10)
        pipelined.place_kv([])
        pace.sent([pipelined], 1, planned_at=sent_at - 0.25)
    assert not pace.is_turn(pipelined, 0.9)
    assert pace.take_delay() == pytest.approx(STAGE_S - 0.25, abs=0.01)


class Line:
    """Stages in a row, each of which computes one step after the other, and chunks that follow one
    another as soon as they may."""

    def __init__(self, clock: Clock, seconds: Sequence[float]) -> None:
        self.clock = clock
        self.seconds = seconds
        self.free_at = [0.0] * len(seconds)
        total_s = sum(seconds)
        self.pace = ChunkPace(lambda: StepCost([1], [total_s]), len(seconds), clock)
        # When each on its way was sent, and what stages say of it if they were asked.
        self.flights: deque[tuple[float, list[Span], bool]] = deque()

    def send(self) -> float:
        """Seconds from now until a chunk went out."""
        began_at, pipelined = self.clock.now, PipelinedTree(7, 10)
        while not self.pace.is_turn(pipelined, 0.9):
            turn_at = self.clock.now + (self.pace.take_delay() or 0.0)
            self._answer_until(turn_at)
            self.clock.now = turn_at
        is_timed = self.pace.wants_spans()
        arrives = self.clock.now
        spans: list[Span] = []
        for stage, seconds in enumerate(self.seconds):
            begin = max(arrives, self.free_at[stage])
            self.free_at[stage] = arrives = begin + seconds
            spans.append((begin, arrives))
        self.flights.append((self.clock.now, spans, is_timed))
        self.pace.sent([pipelined], 1, planned_at=None)
        return self.clock.now - began_at

    def _answer_until(self, until: float) -> None:
        while self.flights and self.flights[0][1][-1][1] <= until:
            sent_at, spans, is_timed = self.flights.popleft()
            self.clock.now = spans[-1][1]
            if is_timed:
                self.pace.note_spans(spans, 1)
            answered = PipelinedTree(7, 10)
            answered.note_flight(self.clock.now)
            self.pace.finished([answered], 1, sent_at)


@pytest.mark.parametrize("slow", [0, 2, 5])
def test_slices_go_out_as_the_slowest_stage_gets_free(clock: Clock, slow: int) -> None:
    line = Line(clock, [2.0 if stage == slow else 1.0 for stage in range(6)])
    for _ in range(50):
        line.send()
    apart = [line.send() for _ in range(100)]
    assert np.mean(apart) == pytest.approx(2.0, rel=0.01)


def test_a_stage_that_is_as_fast_as_others_again_is_noticed(clock: Clock) -> None:
    line = Line(clock, [1.0] * 5 + [2.0])
    for _ in range(200):
        line.send()
    line.seconds = [1.0] * 6
    for _ in range(300):
        line.send()
    assert np.mean([line.send() for _ in range(50)]) < 1.1
