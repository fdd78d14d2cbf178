"""Attempts to learn of another tenant's text, by what a lookup answers and by what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.arrays import Int64
from draftline.retrieval_store.search import lookup as lookup_module
from draftline.retrieval_store.search.lookup import SegmentLookup
from draftline.retrieval_store.segment.segment import Segment
from draftline.retrieval_store.segment.view import SIZE, VOCAB_SIZE
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.segments import context, make_segment
from support.servers.learning_replica import Replica

TRICKS = (
    "victim2", "victi", "Victim", "VICTIM", "victim ", " victim", "victim\0", "victim/", "./victim",
    "victim:", "v*", "*", "?ictim", "[v]ictim", "victim*", "{victim}", "{draftline:retrieval}",
    "victim\n", "../victim", "shared/../victim", "victim.segment", "\uff56ictim", "",
)  # fmt: skip
SECRET = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.mark.parametrize("name", TRICKS)
def test_no_other_name_reads_a_namespace(tmp_path: Path, name: str) -> None:
    replica = Replica(str(tmp_path))
    replica.learn("victim", *SECRET)
    replica.folder.fold("victim", must=True)
    replica.learn("victim", *SECRET, 7)
    assert replica.fresh_answer("victim", 3, 1) == {4}
    replica.learn(name, 3, 1, 8)
    replica.service.refresh()
    for cut in range(2, len(SECRET)):
        assert replica.answer(name, *SECRET[:cut]) <= {8}
    # And nothing was written where the victim reads it.
    assert replica.answer("victim", 3, 1) == {4}


class Work:
    """What the compiled part of each lookup was given to walk: it touches nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[Int64] = []
        walk: Any = lookup_module._subtree

        def recorded(rows: Int64, *rest: Any) -> Any:
            self.rows.append(rows.copy())
            return walk(rows, *rest)

        monkeypatch.setattr(lookup_module, "_subtree", recorded)

    def sizes(self) -> list[list[list[int]]]:
        """Suffixes and vocabulary of each segment walked, a list a lookup."""
        found = [rows[:, [SIZE, VOCAB_SIZE]].tolist() for rows in self.rows]
        self.rows.clear()
        return found


def crowd(count: int, length: int) -> dict[str, list[Segment]]:
    """Other tenants with much text that holds the victim's contexts, too."""
    rng = np.random.default_rng(0)
    documents = [[1, 2, *rng.integers(0, 32, length).tolist()]]
    return {f"other{index}": [make_segment(documents)] * (index + 1) for index in range(count)}


def test_a_lookup_costs_the_same_whatever_others_store(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    own = {"shared": [make_segment([[1, 2, 3]])], "own": [make_segment([[1, 2, 4]])]}
    alone, crowded = SegmentLookup(own), SegmentLookup(own | crowd(6, 3000))
    asked = ([context(1, 2)] * 3, ["own", "shared", "unknown"], [8] * 3)
    answers = alone.lookup(*asked)
    # The very segments, not only as many of them.
    before = [rows.tolist() for rows in work.rows]
    assert work.sizes() == [[[4, 32], [4, 32]], [[4, 32]], [[4, 32]]]
    also = crowded.lookup(*asked)
    assert [rows.tolist() for rows in work.rows] == before
    assert [one.tokens.tolist() for one in answers] == [one.tokens.tolist() for one in also]


def test_a_lookup_costs_the_same_whatever_others_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(monkeypatch)
    replica = Replica(str(tmp_path))
    replica.learn("own", 1, 2, 4)
    assert replica.fresh_answer("own", 1, 2) == {4}
    before = work.sizes()
    for index in range(20):
        replica.learn(f"other{index}", 1, 2, *[index] * 300)
    replica.folder.fold("other3", must=True)
    assert replica.fresh_answer("own", 1, 2) == {4}
    assert replica.answer("nobody", 1, 2) == set()
    # Who has nothing walks nothing.
    assert work.sizes() == before


texts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=4)


@given(own=texts, other=texts, asked=st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_answers_never_depend_on_other_tenants(
    own: Sequence[Sequence[int]], other: Sequence[Sequence[int]], asked: Sequence[int]
) -> None:
    alone = SegmentLookup({"own": [make_segment(own)]})
    beside = SegmentLookup({"own": [make_segment(own)], "other": [make_segment(other)]})
    for namespace in ("own", "nobody"):
        answers = [
            lookup.lookup([context(*asked)], [namespace], [16])[0] for lookup in (alone, beside)
        ]
        assert answers[0].match_len == answers[1].match_len
        assert answers[0].tokens.tolist() == answers[1].tokens.tolist()
        assert answers[0].log_probs.tolist() == answers[1].log_probs.tolist()
