"""What a head of the last stage knows of KV slots: rows that were read, and rows that wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from draftline.core.arrays import Int32
from draftline.core.steps import StepInput, prompt_step
from draftline.drafters.heads import waiting_rows
from draftline.drafters.heads.waiting_rows import TextsToRead, WaitingRows
from draftline.models.stage.stage_heads import TextRows
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

BLOCK_SIZE, NUM_BLOCKS = 4, 16
# Two requests, none of whose blocks are shared or in order.
TABLES = np.array([[5, 2, 9, 0, 7], [1, 8, 3, 6, 4]], dtype=np.int32)
NOBODY = np.zeros(2, dtype=np.bool_)


def slot(request: int, position: int) -> int:
    block, offset = divmod(position, BLOCK_SIZE)
    return int(TABLES[request, block]) * BLOCK_SIZE + offset


def texts_of(*spans: range) -> TextRows:
    """Rows of the requests at these positions; the token behind position p is p + 1."""
    placed = [(slot(request, p), p) for request, span in enumerate(spans) for p in span]
    slots, positions = np.array(placed, dtype=np.int32).reshape(-1, 2).T.copy()
    starts = np.cumsum([0, *map(len, spans)]).astype(np.int32)
    return TextRows(slots, positions, positions + 1, starts, tuple(range(len(spans))))


def features_of(texts: TextRows) -> Tensor:
    """A row says its slot and position."""
    return torch.from_numpy(np.stack([texts.slots, texts.positions], axis=1).astype(np.float32))


def step_at(*lengths: int) -> StepInput:
    """A step whose requests have such contexts."""
    return replace(
        prompt_step(1, BLOCK_SIZE),
        context_lens=np.array(lengths, dtype=np.int32),
        block_tables=TABLES[: len(lengths)],
    )


class Kept:
    """Rows of two requests, and checks of what is to be read."""

    def __init__(self) -> None:
        self.rows = WaitingRows(NUM_BLOCKS * BLOCK_SIZE, torch.zeros(0, 2))
        self.rows.load_loops()

    def add(self, first: range = range(0), second: range = range(0)) -> None:
        texts = texts_of(first, second)
        self.rows.overwritten(texts.slots)
        self.rows.add(texts, features_of(texts), NOBODY)

    def laid(self, step: StepInput, texts: TextRows, *places: int, most: int = 99) -> TextsToRead:
        asked = np.array(places, dtype=np.int32)
        return self.rows.to_read(step, texts, asked, BLOCK_SIZE, most)

    def read(self, place: int, span: range, most: int = 99) -> tuple[list[int], list[int]]:
        """Positions that are known, and those that are read with rows at the end of a text."""
        texts = texts_of(*(span if index == place else range(0) for index in range(2)))
        self.rows.overwritten(texts.slots)
        laid = self.laid(step_at(span.start, span.start), texts, place, most=most)
        read = laid.positions.tolist()
        assert laid.following.tolist() == [position + 1 for position in read]
        given = self.rows.features_of(laid.sources, features_of(texts))
        assert given.int().tolist() == [[slot(place, p), p] for p in read]
        assert laid.read_slots.tolist() == [slot(place, p) for p in read]
        assert laid.counts.tolist() == [len(read)]
        by_slot = {slot(place, p): p for p in range(span.stop)}
        known = [by_slot[one] for one in laid.slots[: laid.num_known[0]].tolist()]
        self.rows.note_read(laid.read_slots)
        return known, read


def test_rows_wait_until_their_text_is_read() -> None:
    kept = Kept()
    kept.add(range(3), range(2))
    kept.add(range(3, 4), range(2, 5))
    assert kept.read(0, range(4, 6)) == ([], [0, 1, 2, 3, 4, 5])
    assert kept.read(0, range(6, 7)) == ([0, 1, 2, 3, 4, 5], [6])
    # The other one's wait still; what it has not is a hole.
    kept.add(second=range(7, 9))
    assert kept.read(1, range(9, 10)) == ([], [0, 1, 2, 3, 4, 7, 8, 9])


def test_texts_of_several_requests_are_laid_out_at_once() -> None:
    kept = Kept()
    kept.add(range(2), range(3))
    texts = texts_of(range(2, 4), range(3, 4))
    laid = kept.laid(step_at(2, 3), texts, 0, 1)
    assert laid.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert laid.counts.tolist() == [4, 4]
    given = kept.rows.features_of(laid.sources, features_of(texts))
    assert given[:, 0].tolist() == [slot(r, p) for r in range(2) for p in range(4)]
    # Those of one alone, of whom nothing waits, are the rows as they come.
    kept.rows.clear()
    laid = kept.laid(step_at(2, 3), texts, 0)
    assert kept.rows.features_of(laid.sources, features_of(texts))[:, 1].tolist() == [2, 3]


def test_wanted_requests_are_not_kept() -> None:
    kept = Kept()
    texts = texts_of(range(2), range(2))
    kept.rows.add(texts, features_of(texts), np.array([True, False]))
    assert kept.read(0, range(2, 3)) == ([], [2])
    assert kept.read(1, range(2, 3)) == ([], [0, 1, 2])


def test_rows_that_are_computed_again_take_the_place_of_those_that_wait() -> None:
    kept = Kept()
    kept.add(range(6))
    kept.add(range(2, 4))
    # Rows from 4 on are overwritten by the step that reads.
    assert kept.read(0, range(4, 6)) == ([], [0, 1, 2, 3, 4, 5])


def test_what_waits_goes_where_its_slot_is_moved() -> None:
    kept = Kept()
    kept.add(range(2))
    tree = texts_of(range(2, 3))._replace(slots=np.array([slot(0, 5)], dtype=np.int32))
    features = torch.tensor([[float(slot(0, 2)), 2.0]])
    kept.rows.add(tree, features, NOBODY[:1])
    kept.rows.move(np.array([[slot(0, 5), slot(0, 2)]], dtype=np.int32))
    assert kept.read(0, range(3, 4)) == ([], [0, 1, 2, 3])
    # Nothing is left where it came from.
    assert kept.read(0, range(6, 7)) == ([0, 1, 2, 3], [6])


def test_rows_before_one_that_was_read_are_not_read_any_more() -> None:
    kept = Kept()
    kept.add(range(2))
    kept.rows.note_read(np.array([slot(0, 2)], dtype=np.int32))
    assert kept.read(0, range(3, 4)) == ([2], [3])


def test_a_context_has_a_bound() -> None:
    kept = Kept()
    kept.add(range(8))
    assert kept.read(0, range(8, 9), most=3) == ([], [5, 6, 7, 8])
    assert kept.read(0, range(9, 10), most=2) == ([7, 8], [9])


def test_features_are_copied() -> None:
    kept = Kept()
    texts = texts_of(range(2))
    features = features_of(texts)
    kept.rows.add(texts, features, NOBODY[:1])
    features.zero_()
    assert kept.read(0, range(2, 3)) == ([], [0, 1, 2])


def test_old_rows_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_rows, "MOST_ROWS", 4)
    monkeypatch.setattr(waiting_rows, "MOST_ROWS_OF_ALL", 6)
    kept = Kept()
    kept.add(range(9))
    assert kept.read(0, range(9, 10)) == ([], [5, 6, 7, 8, 9])
    kept.rows.clear()
    kept.add(range(3))
    kept.add(range(3, 5))
    assert kept.read(0, range(5, 6)) == ([], [1, 2, 3, 4, 5])
    kept.rows.clear()
    kept.add(range(3), range(3))
    kept.add(range(3, 4))
    # The oldest of all went.
    assert kept.read(0, range(4, 5)) == ([], [1, 2, 3, 4])
    assert kept.read(1, range(3, 4)) == ([], [0, 1, 2, 3])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["wait", "read", "move", "over"]),
            st.lists(st.integers(0, 19), min_size=1, max_size=6, unique=True),
            st.integers(0, 19),
        ),
        max_size=40,
    )
)
def test_states_follow_every_change(changes: list[tuple[str, list[int], int]]) -> None:
    """As a dictionary by slot, in which the oldest of more than 8 features are let go."""
    rows = WaitingRows(20, torch.zeros(0, 1))
    rows._owners, rows._following = rows._owners[:8].copy(), rows._following[:8].copy()
    features = torch.zeros(8, 1)
    rows._features = features
    said: dict[int, float | None] = {}
    ring: list[float | None] = [None] * 8
    count = 0
    for number, (change, slots, other) in enumerate(changes):
        own = np.array(slots, dtype=np.int32)
        match change:
            case "wait":
                starts = np.array([0, len(own)], dtype=np.int32)
                values = torch.arange(len(own))[:, None] + 10.0 * number + 1
                rows.add(TextRows(own, own, own, starts, ()), values, NOBODY[:1])
                for one, value in zip(slots, values[:, 0].tolist(), strict=True):
                    gone, ring[count % 8] = ring[count % 8], value
                    said = {s: v for s, v in said.items() if v is None or v != gone}
                    said[one] = value
                    count += 1
            case "read":
                rows.note_read(own)
                said |= dict.fromkeys(slots)
            case "over":
                rows.overwritten(own)
                said = {s: v for s, v in said.items() if s not in slots}
            case _:
                source = slots[0]
                rows.move(np.array([[source, other]], dtype=np.int32))
                found = said.get(source, "nothing")
                if found is not None and source != other:
                    said.pop(source, None)
                said.pop(other, None)
                if found != "nothing":
                    said[other] = found  # type: ignore[assignment]
        assert_states(rows, said)


def assert_states(rows: WaitingRows, said: dict[int, float | None]) -> None:
    states: Int32 = rows._states
    for one, state in enumerate(states.tolist()):
        if state >= 0:
            assert rows._owners[state] == one
            assert rows._features[state, 0].item() == said[one]
        else:
            assert (state == waiting_rows.READ) == (said.get(one, 0) is None)
            assert state == waiting_rows.READ or one not in said
    assert (rows._owners >= 0).sum() == (states >= 0).sum()
