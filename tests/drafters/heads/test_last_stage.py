"""A head of the last stage over steps of several requests: late, left out, and asked again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from draftline.core.arrays import Int32
from draftline.core.steps import (
    EVERY_LENGTH_BUCKET,
    HeadDrafts,
    HeadTask,
    SamplingRows,
    StepInput,
    StepOutput,
    StepTrees,
)
from draftline.models.stage import stage_heads as stage_heads_module
from draftline.models.stage.gpu_path import Work
from draftline.models.stage.stage_heads import MOST_FAILURES, StageHeads
from support.inputs.stage_head_steps import HIDDEN_SIZE, stage_heads, steps_of

NUM_REQUESTS, NUM_ROWS = 3, 5
NUM_SLOTS, STEPS = steps_of(NUM_REQUESTS)
NOBODY = HeadTask("head", (), (), ())


def run(heads: StageHeads, number: int, step: StepInput | None = None) -> tuple[HeadDrafts, ...]:
    """One of the steps, or another with its features and targets."""
    own, targets = STEPS[number]
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(NUM_REQUESTS * NUM_ROWS, HIDDEN_SIZE, generator=generator)
    return heads.draft(step or own, targets, None, states)


def with_tasks(number: int, tasks: tuple[HeadTask, ...]) -> StepInput:
    step, _ = STEPS[number]
    return replace(step, heads=replace(step.heads, tasks=tasks))


def without_drafts(number: int) -> StepInput:
    return with_tasks(number, (NOBODY,))


def contents(drafts: tuple[HeadDrafts, ...]) -> list[tuple[list[int], list[float]]]:
    [own] = drafts
    return [(one.tokens.tolist(), one.log_probs.tolist()) for one in own.proposals]


def assert_same(found: tuple[HeadDrafts, ...], expected: tuple[HeadDrafts, ...]) -> None:
    for mine, theirs in zip(contents(found), contents(expected), strict=True):
        assert mine[0] == theirs[0]
        assert len(mine[0]) == 1
        assert mine[1] == pytest.approx(theirs[1], rel=1e-4)


def test_rows_that_waited_are_read_as_if_they_had_been_read_at_once() -> None:
    at_once, late = stage_heads(NUM_SLOTS), stage_heads(NUM_SLOTS)
    for number in range(6):
        assert len(contents(run(at_once, number))) == NUM_REQUESTS
        assert contents(run(late, number, without_drafts(number))) == []
    assert_same(run(late, 6), run(at_once, 6))
    # Without them it says something else.
    assert contents(run(stage_heads(NUM_SLOTS), 6)) != contents(run(late, 6))


class CountedWork:
    """A capture that does the work again."""

    num_replays = 0

    def __call__(self, work: Work) -> Work:
        def replay() -> None:
            self.num_replays += 1
            work()

        return replay

    def obstacle(self, work: Work) -> None:
        """None."""


def test_trees_are_grown_by_graphs_where_the_stage_has_graphs() -> None:
    captures = CountedWork()
    captured = stage_heads(NUM_SLOTS, "dynamic", captures)
    expected = stage_heads(NUM_SLOTS, "dynamic")
    places = tuple(range(NUM_REQUESTS))
    task = HeadTask("head", places, (7, 0, 12), (EVERY_LENGTH_BUCKET,) * NUM_REQUESTS)
    # Caches of a head that is left out are others afterwards.
    for number, tasks in enumerate([(task,), (task,), (), (task,)]):
        step = with_tasks(number, tasks)
        found, wanted = run(captured, number, step), run(expected, number, step)
        for mine, theirs in zip(found, wanted, strict=True):
            # The host ends before a level that no proposed node could be in.
            assert mine.num_levels == 5 >= theirs.num_levels
            assert [len(one.tokens) for one in mine.proposals] == [7, 0, 12]
            for one, other in zip(mine.proposals, theirs.proposals, strict=True):
                assert one.tokens.tolist() == other.tokens.tolist()
                assert one.parents.tolist() == other.parents.tolist()
                assert one.log_probs == pytest.approx(other.log_probs, rel=1e-3)
    assert captures.num_replays == 3


def chains(level_tokens: float) -> HeadDrafts:
    """Drafts of at most five tokens for every request, each level in a pass of its own."""
    heads, places = stage_heads(NUM_SLOTS), tuple(range(NUM_REQUESTS))
    task = HeadTask("head", places, (5,) * NUM_REQUESTS, (EVERY_LENGTH_BUCKET,) * NUM_REQUESTS)
    task = task._replace(level_tokens=level_tokens)
    [drafts] = run(heads, 0, with_tasks(0, (task,)))
    return drafts


def test_a_level_is_drafted_while_enough_texts_are_expected_to_come_so_far() -> None:
    whole = chains(0.0)
    assert whole.num_levels == 5
    paths = np.exp(np.cumsum([one.log_probs for one in whole.proposals], axis=1))
    reach = np.concatenate([[NUM_REQUESTS], paths.sum(axis=0)])
    # As many are taken to go through the next level as went on from the last.
    expected = reach[1:] ** 2 / reach[:-1]
    assert (np.diff(expected) < 0).all()
    for num_levels in range(1, 6):
        drafts = chains(expected[num_levels - 1] * 1.001)
        assert drafts.num_levels == num_levels
        for mine, full in zip(drafts.proposals, whole.proposals, strict=True):
            assert mine.tokens.tolist() == full.tokens[:num_levels].tolist()
    assert chains(float("inf")).num_levels == 1


def test_only_those_that_are_wanted_are_read() -> None:
    heads, every = stage_heads(NUM_SLOTS), stage_heads(NUM_SLOTS)
    for number in range(4):
        task = HeadTask("head", (1,), (1,), (EVERY_LENGTH_BUCKET,))
        [drafts] = run(heads, number, with_tasks(number, (task,)))
        assert len(drafts.proposals) == 1
        run(every, number)
    assert_same(run(heads, 4), run(every, 4))


def test_a_head_that_is_left_out_keeps_nothing_and_begins_anew() -> None:
    heads, fresh = stage_heads(NUM_SLOTS), stage_heads(NUM_SLOTS)
    before = heads.kv_bytes
    for number in range(4):
        run(heads, number)
    assert heads.kv_bytes == before > 0
    idle = with_tasks(4, ())
    assert run(heads, 4, idle) == ()
    assert heads.kv_bytes == 0
    heads.move(np.zeros((1, 2), dtype=np.int32))
    heads.reset()
    assert_same(run(heads, 5), run(fresh, 5))
    assert heads.kv_bytes == before


def test_steps_of_an_engine_that_has_not_asked_yet_free_nothing() -> None:
    """Such as those that are measured at the start."""
    heads = stage_heads(NUM_SLOTS)
    before = heads.kv_bytes
    run(heads, 0, with_tasks(0, ()))
    assert heads.kv_bytes == before


def test_a_head_that_failed_too_often_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = stage_heads(NUM_SLOTS)
    run(heads, 0)

    def failing(*_: object) -> None:
        raise ValueError

    [own] = heads._heads.values()
    monkeypatch.setattr(own, "draft", failing)
    for number in range(MOST_FAILURES):
        assert heads.kv_bytes
        assert contents(run(heads, number)) == []
    assert not heads.kv_bytes


def test_the_stage_says_where_its_walk_ended() -> None:
    heads = stage_heads(NUM_SLOTS)
    [drafts] = run(heads, 0)
    assert drafts.last_rows is not None
    assert drafts.last_rows.tolist() == [2] * NUM_REQUESTS


def test_tokens_of_a_step_of_several_wait_too() -> None:
    heads, expected = stage_heads(NUM_SLOTS), stage_heads(NUM_SLOTS)
    step, targets = STEPS[0]
    firsts = step.request_starts[:-1]
    rows = firsts + np.arange(3, dtype=np.int32)[:, None]
    states = torch.randn(NUM_REQUESTS * NUM_ROWS, HIDDEN_SIZE, generator=seeded(0))
    output = StepOutput(0, targets[firsts], decoded=targets[rows].T.copy())
    idle = without_drafts(0)
    slots, positions = step.slots[rows], step.positions[rows]
    heads.decoded(idle, (slots, positions), output, states[rows])
    run(expected, 0, idle)
    assert_same(run(heads, 1), run(expected, 1))


@pytest.mark.parametrize("moved", [False, True], ids=["in place", "moved"])
def test_rows_of_steps_without_trees_wait_too(moved: bool) -> None:
    """They come one by one, are handed to the head together, and go where the KV goes."""
    heads, expected = stage_heads(NUM_SLOTS), stage_heads(NUM_SLOTS)
    step, targets = STEPS[0]
    states = torch.randn(NUM_REQUESTS * NUM_ROWS, HIDDEN_SIZE, generator=seeded(0))
    there = step.slots
    elsewhere = there[::-1].copy() if moved else there
    for row in range(3):
        rows = step.request_starts[:-1] + row
        one = root_step(without_drafts(0), rows, elsewhere[rows])
        reused = states[rows].clone()
        assert heads.draft(one, targets[rows], None, reused) == ()
        # As the buffers of a graph are.
        reused.zero_()
    if moved:
        kept = np.concatenate([step.request_starts[:-1] + row for row in range(3)])
        heads.move(np.stack([elsewhere[kept], there[kept]], axis=1))
    run(expected, 0, without_drafts(0))
    assert_same(run(heads, 1), run(expected, 1))
    assert contents(run(stage_heads(NUM_SLOTS), 1)) != contents(run(heads, 1))


def test_a_slot_that_is_written_twice_holds_the_last_row() -> None:
    """Rows that wait together are of several steps, and a slot may go from one text to another."""
    heads, expected, other = (stage_heads(NUM_SLOTS) for _ in range(3))
    step, targets = STEPS[0]
    rows = step.request_starts[:-1]
    one = root_step(without_drafts(0), rows, step.slots[rows])
    states = torch.randn(NUM_REQUESTS, HIDDEN_SIZE, generator=seeded(0))
    for own in (heads, other):
        own.draft(one, targets[rows], None, -states)
    for own in (heads, expected):
        own.draft(one, targets[rows], None, states)
    found = run(heads, 1)
    assert_same(found, run(expected, 1))
    assert contents(found) != contents(run(other, 1))


def root_step(step: StepInput, rows: Int32, slots: Int32) -> StepInput:
    """A step of these rows alone, one of each request, in other slots."""
    starts = np.arange(len(rows) + 1, dtype=np.int32)
    positions = step.positions[rows]
    return replace(
        step, token_ids=step.token_ids[rows], positions=positions, slots=slots,
        request_starts=starts, context_lens=positions, logits_rows=starts[:-1],
        trees=StepTrees(np.ones(len(rows), dtype=np.uint64), starts, slots, positions, len(rows)),
        sampling=SamplingRows.greedy(positions.astype(np.int64) + 1),
    )  # fmt: skip


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_loops_are_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(stage_heads_module, "load_walk", lambda: calls.append(1))
    stage_heads(NUM_SLOTS)
    assert calls == [1]
