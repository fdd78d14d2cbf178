"""Simulated stages leave out what an answer has made vain, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from draftline.benchmarks.step.streaming.cases import BUNDLED, Load
from draftline.benchmarks.step.streaming.known_pace import KnownPace
from draftline.benchmarks.step.streaming.pruning import Pruned, drawn, pruned, pruning_loads, row_of
from draftline.benchmarks.step.streaming.replayed_stages import Fate, RunStep
from draftline.benchmarks.step.streaming.run import measure
from draftline.benchmarks.step.streaming.stage_line import PROFILE, StageLine, StageTimes
from draftline.core.request.chosen import RowAnswer
from draftline.core.schedule.pace import SlicePace
from draftline.core.schedule.step_cost import StepCost
from draftline.core.tree.streamed_tree import StreamedTree
from draftline.measure.replay.recording import RecordedAnswer, Recording
from draftline.measure.simulate.cost_profile import read_cost_profile

# A step of two rows takes 3 s, of one row 2 s, a message none, so that sums are exact.
TIMES = StageTimes(stage_s=1.0, row_s=1.0, hop_s=0.0, is_pruned=True)
SHORT = StageTimes(stage_s=0.005, row_s=0.0001, hop_s=0.0004)
LOAD = Load(prompts=BUNDLED, temperature=0.0, drafters="suffix", stages=4, together=1)


def test_a_stage_leaves_out_rows_that_it_has_heard_of() -> None:
    line = StageLine(3, TIMES)
    # One row is in vain from 3 s on, as the second stage begins, the other from 5 s on, which is
    # while it computes.
    passage = line.send(0.0, 2, [5.0, 3.0])
    assert passage.rows == (2, 1, 0)
    assert passage.spans == ((0.0, 3.0), (3.0, 5.0), (5.0, 5.0))
    assert passage.answered_at == 5.0


def test_a_step_without_rows_waits_for_those_before_it() -> None:
    line = StageLine(2, TIMES)
    before = line.send(0.0, 2, [])
    vain = line.send(0.0, 2, [0.0, 0.0])
    behind = line.send(0.0, 2, [])
    assert vain.rows == (0, 0)
    assert before.answered_at == vain.answered_at == 6.0
    # It would have taken the stages 3 s.
    assert behind.answered_at == 9.0
    assert behind.waited_s == 3.0


def test_a_message_takes_its_time_and_is_sent_only_where_it_is_said() -> None:
    late = replace(TIMES, hop_s=0.5)
    assert StageLine(1, late).send(0.0, 1, [0.25]).rows == (1,)
    assert StageLine(1, late).send(0.0, 1, [0.0]).rows == (0,)
    assert StageLine(1, replace(TIMES, is_pruned=False)).send(1.0, 1, [0.0]).rows == (1,)


def test_the_last_stage_may_take_longer() -> None:
    passage = StageLine(2, replace(TIMES, last_s=4.0)).send(0.0, 1, [])
    assert passage.spans == ((0.0, 2.0), (2.0, 8.0))


@cache
def _recording() -> Recording:
    """Texts that repeat themselves and then do not: drafts are right for a while."""
    answers = []
    for seed in range(2):
        part = tuple(range(10 + seed, 22 + seed))
        answers.append(RecordedAnswer(
            name=f"r{seed}", prompt="", seed=seed + 1, prompt_ids=part + part[:2],
            answer_ids=(*part[2:], *part[:6], 5, *part[3:9], 6, *part),
            top_next_tokens=(),
        ))  # fmt: skip
    return Recording(
        model="demo", max_tokens=64, temperature=0.0, ignore_eos=True, answers=tuple(answers)
    )


def _steps(*, is_pruned: bool) -> list[RunStep]:
    """Those of a run, which says so if a text has changed."""
    recording, times = _recording(), replace(SHORT, is_pruned=is_pruned)
    profile = read_cost_profile(PROFILE).model_copy(update={"slowdown": 1})
    _, steps = measure(LOAD, "streamed", recording, recording.answers, times, profile, 1000.0)
    return [*steps]


def test_texts_and_their_order_stay_where_rows_are_left_out() -> None:
    plain, steps = _steps(is_pruned=False), _steps(is_pruned=True)
    assert all(count == step.num_rows for step in plain for count in step.passage.rows)
    assert any(step.passage.rows[-1] < step.num_rows for step in steps)
    for step in steps:
        fates = [fate for part in step.parts for fate in part.fates]
        num_vain = sum(len(part.vain_at) for part in step.parts)
        # Only killed rows, and all of a slice whose nodes are; no stage computes what one left out.
        assert num_vain in {fates.count(Fate.KILLED), step.num_rows}
        assert step.num_rows - num_vain <= step.passage.rows[-1]
        assert sorted(step.passage.rows, reverse=True) == [*step.passage.rows]
        # A row that the text goes through is computed.
        assert step.passage.rows[-1] >= fates.count(Fate.RIGHT)
    ends = [step.passage.answered_at for step in steps]
    assert sorted(ends) == ends


def test_the_first_slice_behind_a_miss_is_told_from_those_behind_it() -> None:
    parts = [part for step in _steps(is_pruned=False) for part in step.parts]
    is_first = [part.is_first for part in parts]
    assert is_first[0]
    assert 1 < sum(is_first) < len(is_first)
    # Nothing of a first slice was known before.
    assert not any(part.vain_at for part in parts if part.is_first)


@pytest.mark.parametrize(
    ("is_known", "took_s", "expected_s"),
    [(False, 2.0, 7.4), (True, 2.0, 8.0), (False, 16.0, 8.8), (True, 16.0, 8.8)],
)
def test_a_step_that_was_answered_early_makes_no_stage_quicker(
    is_known: bool, took_s: float, expected_s: float
) -> None:
    """A step takes 8 stages 8 s; so long after it the next slice's answer is expected."""
    given = (lambda: StepCost([1], [8.0])), 8, lambda: 0.0
    pace = KnownPace(*given, 1 / 8) if is_known else SlicePace(*given)
    pace.answered([StreamedTree[RowAnswer](7, 10)], 1, -took_s)
    stream = StreamedTree[RowAnswer](7, 10)
    stream.place([])
    pace.sent([stream], 1, planned_at=None)
    assert stream.next_answer_at() == pytest.approx(expected_s)


def test_slices_wait_for_the_slowest_stage_where_it_is_known() -> None:
    # Three stages of 1 s, a last one of 5 s: 8 s in all, of which a mean one takes 2 s.
    times = StageTimes(stage_s=1.0, row_s=0.0, hop_s=0.0, last_s=4.0)
    assert times.slowest(4) == 5 / 8
    pace = KnownPace(lambda: StepCost([1], [8.0]), 4, lambda: 0.0, times.slowest(4))
    stream = StreamedTree[RowAnswer](7, 10)
    for free_at in (5.0, 10.0):
        pace.sent([stream], 1, planned_at=None)
        assert not pace.is_turn(stream, 1.0)
        assert pace.take_delay() == free_at


def test_shares_are_of_all_stages_and_rows_of_a_table_tell_medians() -> None:
    steps = _steps(is_pruned=True)
    recording, profile = _recording(), read_cost_profile(PROFILE)
    found, _ = measure(LOAD, "streamed", recording, recording.answers, SHORT, profile, 1000.0)
    run = pruned(found, steps, 1)
    assert 0 < run.rows < found.killed + run.steps
    assert 0 < run.steps < 1
    assert 0 <= run.waits < 1
    runs = {
        name: [Pruned(tokens_s=rate, killed=0.5, rows=0.1, steps=0.2, waits=0.001)] * 2
        for name, rate in {"without": 100.0, "with": 103.0, "nudged": 101.0}.items()
    }
    row = row_of(LOAD, runs)
    assert row[7:9] == ("1.030 (1.030-1.030)", "1.010 (1.010-1.010)")
    assert row[9:] == ("50%", "10.0%", "20.0%", "0.1%", "0.1%")


@pytest.mark.parametrize("load", [*pruning_loads()])
def test_all_loads_are_streamed(load: Load) -> None:
    """A request has a flight for each stage and one more, shared out among requests."""
    assert (load.stages + 1) // load.together >= 2


def test_rounds_draw_other_prompts_alike_each_time() -> None:
    recording = _recording()
    many = replace(recording, answers=recording.answers * 20)
    assert drawn(LOAD, many, 0) == drawn(LOAD, many, 0)
    assert [a.seed for a in drawn(LOAD, many, 0)] != [a.seed for a in drawn(LOAD, many, 1)]
