"""Of readings of a head whose config leaves them open, the one that is right most often stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from draftline.core.errors import DrafterError
from draftline.core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
    chain_proposal,
    empty_proposal,
)
from draftline.drafters.heads import reading_trial
from draftline.drafters.heads.reading_trial import (
    MOST_QUERIES,
    NUM_DRAFTS,
    ProbingDrafter,
    ReadingTrial,
)
from support.fakes.fake_drafters import CountingDrafter

LEVELS = 3


class Reader(CountingDrafter):
    """Counts upwards for `num_right` tokens, then says something else; empty where that is None."""

    def __init__(self, num_right: int | None) -> None:
        super().__init__("head")
        self.num_right = num_right
        self.feature_layers = FeatureLayers((1, 3), 4)
        self.features: list[FeatureRows] = []
        self.clock: Callable[[], float] = time.monotonic
        self.num_passes = 0

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        self.features += rows

    def propose_one(self, query: Query) -> Proposal:
        self.num_passes += LEVELS
        if self.num_right is None:
            return empty_proposal(self.name)
        last = super().propose_one(query).tokens[0] - 1
        counted = [last + k + 1 + 9 * (k >= self.num_right) for k in range(LEVELS)]
        return chain_proposal(self.name, np.array(counted, dtype=np.int32) % 50)


class Session:
    """A text that counts upwards."""

    def __init__(self, drafter: ProbingDrafter) -> None:
        self.drafter = drafter
        self.length = 4
        drafter.open(DraftRequest("r", np.arange(4, dtype=np.int32), 4, 0.0, 0))

    def step(self, count: int = 1, deadline: float | None = None) -> Proposal:
        [proposal] = self.drafter.propose([Query("r", self.length, 8)], deadline)
        tokens = np.arange(self.length, self.length + count, dtype=np.int32) % 50
        self.drafter.observe([Commit("r", self.length, tokens)])
        self.length += count
        return proposal


def probing_of(**readings: Reader) -> ProbingDrafter:
    trial = ReadingTrial(list(readings), LEVELS, "/heads/mine", "head")
    return ProbingDrafter(readings, trial)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_reading_that_is_right_more_often_stays(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Reader(1), Reader(2)
    drafter = probing_of(first=first, second=second)
    session = Session(drafter)
    assert drafter.feature_layers == first.feature_layers
    with caplog.at_level(logging.WARNING):
        while not drafter.is_over:
            proposal = session.step(count)
    assert proposal.tokens[1] == proposal.tokens[0] + 1, "the best so far was heard"
    [record] = caplog.records
    assert record.getMessage() == (
        f"drafter=head event=probed drafts={NUM_DRAFTS} kept=second tokens=2.00 not=first "
        "tokens=1.00: config.json in /heads/mine does not tell, and these drafts are right most "
        "often; say so there"
    )
    assert drafter.acceptance == {"second": 2.0, "first": 1.0}
    # From now on the other hears nothing.
    asked = len(first.texts["r"])
    drafter.observe_features([FeatureRows("r", 0, np.zeros((1, 8), dtype=np.float32))])
    session.step()
    assert len(first.texts["r"]) == asked
    assert (len(first.features), len(second.features)) == (0, 1)


def test_of_equals_the_likeliest_stays() -> None:
    drafter = probing_of(first=Reader(2), second=Reader(2))
    session = Session(drafter)
    while not drafter.is_over:
        session.step()
    assert list(drafter.acceptance) == ["first", "second"]


def test_drafts_that_one_reading_did_not_make_in_time_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A reading that has nothing to say, or comes after the deadline, loses nothing by that."""
    drafter = probing_of(first=Reader(3), second=Reader(None))
    session = Session(drafter)
    with caplog.at_level(logging.WARNING):
        for _ in range(MOST_QUERIES - 1):
            session.step()
        assert not drafter.is_over
        session.step()
    assert drafter.is_over
    assert "drafts=0" in caplog.text
    late = probing_of(first=Reader(1), second=Reader(2))
    session = Session(late)
    for _ in range(2 * NUM_DRAFTS):
        session.step(deadline=0.0)
    assert not late.is_over


def test_only_whole_drafts_of_open_requests_are_judged() -> None:
    drafter = probing_of(first=Reader(1), second=Reader(2))
    for _ in range(NUM_DRAFTS):
        session = Session(drafter)
        session.step(LEVELS - 1)
        drafter.close("r")
    assert not drafter.is_over
    assert set(drafter.acceptance.values()) == {0.0}
    with pytest.raises(DrafterError):
        drafter.propose([Query("r", 4, 8)])


def test_memory_is_that_of_all_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_trial, "NUM_DRAFTS", 1)
    drafter = probing_of(first=Reader(1), second=Reader(2))
    session = Session(drafter)
    both = drafter.memory_bytes
    while not drafter.is_over:
        session.step()
    assert 0 < drafter.memory_bytes < both


def test_passes_are_those_of_all_readings_and_times_by_one_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading_trial, "NUM_DRAFTS", 1)
    first, second = Reader(1), Reader(2)
    drafter = probing_of(first=first, second=second)
    drafter.clock = lambda: 7.0
    assert first.clock() == second.clock() == drafter.clock() == 7.0
    session = Session(drafter)
    passes = [drafter.num_passes]
    while not drafter.is_over:
        session.step()
        passes.append(drafter.num_passes)
    session.step()
    assert passes[:2] == [0, 2 * LEVELS]
    assert drafter.num_passes == passes[-1] + LEVELS, "those of the reading that went still count"


def trial_of(*readings: str) -> ReadingTrial:
    return ReadingTrial(readings, LEVELS, "/heads/mine", "head")


def draft(*tokens: int) -> Proposal:
    return chain_proposal("head", np.array(tokens, dtype=np.int32))


def test_a_text_of_which_a_part_was_not_heard_judges_nothing() -> None:
    trial = trial_of("first", "second")
    for length, tokens in ((9, [1, 2]), (12, [1, 2])):
        trial.drafted("r", 9, [draft(1, 2, 3), draft(4, 5, 6)])
        trial.followed("r", length, tokens)
    trial.followed("r", 11, [3])
    assert set(trial.acceptance.values()) == {0.0}
    trial.drafted("r", 9, [draft(1, 2, 3), draft(4, 5, 6)])
    for length, token in enumerate([4, 5, 7], start=9):
        trial.followed("r", length, [token])
    assert trial.acceptance == {"second": 2.0, "first": 0.0}


def test_texts_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_trial, "MOST_TEXTS", 2)
    trial = trial_of("first", "second")
    for key in range(3):
        trial.drafted(key, 9, [draft(1, 2, 3), draft(4, 5, 6)])
    trial.followed(0, 9, [1, 2, 3])
    assert trial.acceptance["first"] == 0.0
    trial.followed(2, 9, [1, 2, 3])
    assert trial.acceptance["first"] == 3.0
