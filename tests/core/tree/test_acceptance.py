"""What a node is worth: what its drafter says, corrected by what became of others of its kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.proposals import Proposal
from draftline.core.tree.acceptance import MAX_NODES, AcceptanceTable
from draftline.core.tree.merge import merge


def judged(table: AcceptanceTable, prob: float, accepted: int, count: int, rank: int = 0) -> None:
    for number in range(count):
        table.record("a", math.log(prob), 1, rank, accepted=number < accepted)


def test_a_drafter_is_believed_until_its_nodes_are_judged() -> None:
    table = AcceptanceTable()
    assert table.estimate("a", math.log(0.3), 1, 0) == pytest.approx(0.3)
    assert table.estimate("a", 0.0, 1, 0) == 0.5, "it says nothing: half are right"


def test_it_is_corrected_by_the_nodes_of_the_bin() -> None:
    table = AcceptanceTable()
    judged(table, 0.5, accepted=25, count=100)
    assert table.estimate("a", math.log(0.5), 1, 0) == pytest.approx(0.25, abs=0.02)
    # Within a bin the drafter's order stays.
    assert table.estimate("a", math.log(0.45), 1, 0) < table.estimate("a", math.log(0.55), 1, 0)


def test_an_unseen_bin_is_as_far_off_as_the_drafter() -> None:
    table = AcceptanceTable()
    judged(table, 0.5, accepted=25, count=100)
    assert table.estimate("a", math.log(0.02), 4, 2) == pytest.approx(0.01, abs=0.002)


def test_old_nodes_are_forgotten() -> None:
    table = AcceptanceTable()
    judged(table, 0.5, accepted=0, count=int(MAX_NODES))
    judged(table, 0.5, accepted=1000, count=1000)
    assert table.estimate("a", math.log(0.5), 1, 0) > 0.9


@pytest.mark.parametrize("log_prob", [-200.0, -math.inf])
def test_what_is_called_impossible_is_worth_little_and_ends_nothing(log_prob: float) -> None:
    table = AcceptanceTable()
    tokens, parents = np.arange(2, dtype=np.int32), np.full(2, ROOT, dtype=np.int32)
    log_probs = np.array([log_prob, -0.5], dtype=np.float32)
    tree = merge([Proposal("a", tokens, parents, log_probs)], 8, 8, table)
    unlikely, likely = tree.values.tolist()
    assert 0 < unlikely < 1e-3 < likely < 1
    for _ in range(3):
        table.record("a", log_prob, 1, 0, accepted=False)
    assert 0 < table.estimate("a", log_prob, 1, 0) < 1e-3
