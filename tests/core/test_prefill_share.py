"""Prompts take their share of a step's time beside answers, and no more."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.scheduler import LEAST_ROWS, PrefillShare
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

ROW_S = 0.001


def seconds(num_rows: int) -> float:
    return 0.01 + ROW_S * num_rows


def rows_of(share: PrefillShare, trees: int = 10, room: int = 500, **counts: int) -> int:
    counts = {"num_prompts": 1, "num_answering": 1} | counts
    return share.max_rows(trees, room, **counts)


def test_a_prompt_beside_answers_takes_its_share_of_the_time() -> None:
    # A step of 10 rows takes 20 ms: as much again for prompts is 20 of their rows.
    assert rows_of(PrefillShare(0.5, seconds)) == 20
    assert rows_of(PrefillShare(0.5, seconds), trees=90) == pytest.approx(100, abs=1)
    assert rows_of(PrefillShare(0.8, seconds)) == pytest.approx(80, abs=1)


def test_nothing_is_bounded_without_answers_or_with_a_share_of_one() -> None:
    assert rows_of(PrefillShare(0.1, seconds), num_answering=0) == 500
    assert rows_of(PrefillShare(1.0, seconds)) == 500
    # Where rows cost nothing, prompts slow nobody down.
    assert rows_of(PrefillShare(0.1, lambda _rows: 0.01)) == 500


def test_many_prompts_are_not_held_up_by_one_answer() -> None:
    share = PrefillShare(0.5, seconds)
    counts = [rows_of(share, num_prompts=count) for count in (1, 2, 4, 16, 64)]
    assert counts == sorted(counts)
    assert counts[:2] == [20, 20]
    assert counts[-1] == 500


def settled(share: PrefillShare, row_s: float, num_steps: int = 200, factor: float = 1.0) -> int:
    """Rows that it comes to, where a prompt's row takes `row_s`."""
    share.note_step(10, 0, seconds(10))
    for index in range(num_steps):
        taken_s = seconds(10) + rows_of(share) * row_s
        # Two answers that are read together: the second one seems to have taken less time.
        share.note_step(10, rows_of(share), taken_s * (factor if index % 2 else 2 - factor))
    return rows_of(share)


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_dearer_prompt_rows_are_learned(factor: float) -> None:
    assert settled(PrefillShare(0.5, seconds), 2 * ROW_S, factor=factor) == pytest.approx(10, abs=2)
    assert settled(PrefillShare(0.8, seconds), 8 * ROW_S, factor=factor) == pytest.approx(10, abs=2)
    assert settled(PrefillShare(0.8, seconds), ROW_S, factor=factor) == pytest.approx(80, abs=9)


def test_rows_that_become_cheaper_are_found_out() -> None:
    share = PrefillShare(0.8, seconds)
    assert settled(share, 50 * ROW_S) == LEAST_ROWS
    assert settled(share, ROW_S) == pytest.approx(80, abs=5)


def test_a_stages_time_counts_and_not_that_of_all_stages() -> None:
    idle, busy = (PrefillShare(0.5, seconds, num_stages=4) for _ in range(2))
    for _ in range(30):
        idle.note_step(10, 0, 4 * 0.02, num_in_flight=1)
        busy.note_step(10, 0, 0.02, num_in_flight=5)
    assert rows_of(idle) == rows_of(busy) == pytest.approx(20, abs=1)


def test_a_step_of_prompts_alone_counts_as_one_with_trees() -> None:
    share = PrefillShare(0.5, seconds)
    for _ in range(200):
        share.note_step(90, 0, seconds(90))
    assert rows_of(share, trees=0) == pytest.approx(rows_of(share, trees=90), abs=1)


@given(
    st.floats(0.05, 1), st.integers(0, 300), st.integers(0, 600), st.integers(1, 50),
    st.integers(0, 50), st.lists(st.floats(0, 10), max_size=5),
)  # fmt: skip
def test_prompts_always_get_on_and_fit(
    share: float, trees: int, room: int, prompts: int, answering: int, past: list[float]
) -> None:
    bound = PrefillShare(share, lambda rows: float(np.interp(rows, [1, 600], [0.001, 1.0])))
    for taken in past:
        bound.note_step(trees, 50, taken)
    rows = bound.max_rows(trees, room, num_prompts=prompts, num_answering=answering)
    assert min(LEAST_ROWS, room) <= rows <= room


async def test_short_prompts_are_taken_at_once_and_long_ones_by_their_share() -> None:
    bench = Bench(rows=20, nodes=0, max_running=4, num_blocks=200)
    bench.scheduler._prefill_share = PrefillShare(0.5, lambda rows: 0.1 * rows)
    bench.add("a", [1, 2], 60)
    for _ in range(3):
        await bench.core.step()
    bench.add("bb", [3] * 38, 5)
    bench.add("ccc", [3] * 100, 5)
    await bench.run()
    sizes = [np.diff(step.request_starts).tolist() for step in bench.target.steps]
    assert any(19 in size for size in sizes)
    assert max(max(size) for size in sizes if 19 not in size) <= LEAST_ROWS
    assert bench.tokens("ccc") == plain_answer([3] * 100, 5, 3, 7)
