"""Drafters of this process: what they are told, and what becomes of those that fail."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import numpy as np
import pytest
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.drafting.replies import DrafterLimits
from draftline.cluster.links.failures import RetryPolicy
from draftline.core.proposals import Proposal, Query
from support.fakes.fake_drafters import VOCAB_SIZE, CountingDrafter
from support.fakes.fake_link import FakeClock
from support.servers.hub_session import HubSession

LIMITS = DrafterLimits(
    vocab_size=VOCAB_SIZE, retry=RetryPolicy(tolerated=1, first_delay_s=1.0, max_delay_s=8.0)
)


class Watched(CountingDrafter):
    """Keeps what it was asked, and whom it had to forget; raises when it is told to."""

    def __init__(self) -> None:
        super().__init__("near")
        self.asked: list[tuple[Query, float | None]] = []
        self.ended: list[list[int]] = []
        self.is_broken = self.is_freed = False

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        if self.is_broken:
            raise ZeroDivisionError("a bug")
        self.asked += [(query, deadline) for query in queries]
        return super().propose(queries, deadline)

    def close(self, request_id: str) -> None:
        if request_id in self.texts:
            self.ended.append(self.texts[request_id])
        super().close(request_id)

    def free(self) -> None:
        self.is_freed = True


class Scene:
    """A hub over one drafter, with a clock that the test moves."""

    def __init__(self, *, keeps_answers: bool = True, max_nodes: int = 256) -> None:
        self.clock = FakeClock()
        self.drafter = Watched()
        local = LocalDrafter(self.drafter, max_nodes, keeps_answers)
        self.hub = DrafterHub([local], LIMITS, clock=self.clock, rng=random.Random(3))

    @property
    def stats(self):
        return self.hub.stats()[0]


async def test_it_is_told_when_it_is_asked_and_of_all_that_it_missed_in_one_piece() -> None:
    scene = Scene()
    sessions = [HubSession(scene.hub, name) for name in ("one", "two")]
    for _ in range(3):
        commits = [session.commit(2) for session in sessions]
        await scene.hub.exchange(commits, [session.query() for session in sessions], {})
    assert not scene.drafter.opened
    queries = [session.query() for session in sessions]
    found = await scene.hub.exchange([], queries, {"near": {"two"}})
    assert [len(found[name]) for name in ("one", "two")] == [0, 1]
    [opened] = scene.drafter.opened
    assert (opened.request_id, opened.token_ids.tolist()) == ("two", sessions[1].text)
    for _ in range(3):
        await scene.hub.exchange([sessions[1].commit(2)], [sessions[1].query()], {})
    await sessions[1].step(1)
    assert [(one.base_len, len(one.tokens)) for one in scene.drafter.commits] == [(11, 7)]


async def test_what_it_wished_to_know_stays_apart() -> None:
    scene = Scene()
    session = HubSession(scene.hub)
    await session.step()
    answer = np.array([[3, 1]], dtype=np.int32)
    for commit in (session.commit(2), session.commit(1, {"near": answer}), session.commit(3)):
        await scene.hub.exchange([commit], [session.query()], {})
    await session.step()
    told = [(one.base_len, len(one.tokens), one.probe_ids) for one in scene.drafter.commits]
    assert told == [(5, 2, None), (7, 1, answer), (8, 3, None)]


async def test_a_deadline_and_its_own_limit_of_nodes_go_with_every_query() -> None:
    scene = Scene(max_nodes=3)
    await HubSession(scene.hub).step(budget_s=0.25, max_nodes=8)
    [(query, deadline)] = scene.drafter.asked
    assert (query.max_nodes, deadline) == (3, scene.clock.now + 0.25)


@pytest.mark.parametrize("keeps_answers", [True, False])
async def test_who_learns_is_told_of_every_end_at_once(*, keeps_answers: bool) -> None:
    scene = Scene(keeps_answers=keeps_answers)
    asked, other = (HubSession(scene.hub, name) for name in ("asked", "other"))
    await asked.step(1)
    known = list(asked.text)
    scene.hub.close("asked", [asked.commit(2)])
    scene.hub.close("other", [other.commit(3)])
    expected = [asked.text, other.text] if keeps_answers else [known]
    assert scene.drafter.ended == expected
    assert not scene.drafter.texts


async def test_one_that_fails_is_left_out_and_opened_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    session = HubSession(scene.hub)
    assert await session.step(1)
    scene.drafter.is_broken = True
    with caplog.at_level(logging.WARNING):
        assert await session.step(1) == []
        assert not scene.drafter.texts, "it forgets what it may have got wrong"
        assert (scene.stats.errors, scene.stats.connected) == (1, True), "one is tolerated"
        assert await session.step(1) == []
    assert (scene.stats.errors, scene.stats.connected, scene.stats.circuit_open) == (2, False, True)
    [record] = caplog.records
    assert record.getMessage().startswith(
        "drafter=near event=failed retry_in_s=0.00 it raised ZeroDivisionError in propose at "
    )
    scene.drafter.is_broken = False
    num_opened = len(scene.drafter.opened)
    assert await session.step(2) == []
    assert len(scene.drafter.opened) == num_opened, "not before its delay is over"
    scene.clock.now += 1.0
    [proposal] = await session.step(1)
    assert proposal.tokens.tolist() == session.expected(4)
    assert scene.drafter.opened[-1].token_ids.tolist() == session.text
    assert (scene.stats.errors, scene.stats.reconnects) == (2, 2)
    assert (scene.stats.connected, scene.stats.circuit_open) == (True, False)


async def test_a_request_that_ends_while_it_is_left_out_is_not_told() -> None:
    scene = Scene()
    session = HubSession(scene.hub)
    scene.drafter.is_broken = True
    for _ in range(2):
        await session.step(1)
    scene.hub.close("r")
    scene.drafter.is_broken = False
    num_ended = len(scene.drafter.ended)
    scene.clock.now += 1.0
    again = HubSession(scene.hub, "again")
    [proposal] = await again.step(1)
    assert proposal.tokens.tolist() == again.expected(4)
    assert len(scene.drafter.ended) == num_ended


async def test_it_is_freed_at_the_end_and_called_no_more() -> None:
    scene = Scene()
    session = HubSession(scene.hub)
    await session.step(1)
    await scene.hub.stop()
    assert scene.drafter.is_freed
    assert not scene.drafter.texts
    num_ended = len(scene.drafter.ended)
    scene.hub.close("r", [session.commit(1)])
    assert len(scene.drafter.ended) == num_ended
    assert not scene.stats.connected
