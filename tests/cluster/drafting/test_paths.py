"""Answers behind paths that the target has not confirmed: late ones are used wherever the text, or
a longer path, leads to where they stand.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter, StageDrafts
from draftline.core.proposals import Drafted, StepCommit, chain_proposal
from support.fakes.fake_drafters import CountingDrafter, following
from support.fakes.fake_link import FakeClock, FakeLink
from support.servers.hub_session import LIMITS, HubSession


class Paths:
    """A hub over one link whose answers come when the test says, and a request in it."""

    def __init__(self) -> None:
        self.drafter = CountingDrafter("far", num_tokens=6)
        self.link = FakeLink(self.drafter)
        self.hub = DrafterHub([self.link], LIMITS, clock=FakeClock(), rng=random.Random(3))
        self.session: HubSession = None  # type: ignore[assignment]

    async def begin(self) -> None:
        await self.hub.start()
        self.session = HubSession(self.hub)
        await asyncio.sleep(0)
        self.link.answer()

    async def ask(self, *path: int, committed: tuple[int, ...] = ()) -> list[int] | None:
        """Tokens of the only proposal behind a path, in a step that does not wait."""
        session, commits = self.session, []
        if committed:
            tokens = np.array(committed, dtype=np.int32)
            commits = [StepCommit(session.request_id, len(session.text), tokens)]
            session.text += committed
        query = session.query()._replace(assumed=path or None)
        found = (await self.hub.exchange(commits, [query], budget_s=0.0))["r"]
        if not found:
            return None
        [proposal] = found
        assert proposal.parents.tolist() == list(range(-1, len(proposal.tokens) - 1))
        return proposal.tokens.tolist()

    def counts(self) -> tuple[int, int, int]:
        stats = self.hub.stats()[0]
        return stats.late, stats.late_used, stats.dropped


@pytest.fixture
async def paths() -> Paths:
    scene = Paths()
    await scene.begin()
    return scene


async def test_an_answer_stands_below_the_path_that_was_asked_about(paths: Paths) -> None:
    assert await paths.ask(10, 20) is None
    paths.link.answer()
    assert await paths.ask(10, 20) == [21, 22, 23, 24, 25, 26]
    assert paths.counts() == (0, 0, 0)


async def test_a_late_answer_is_used_where_the_text_went_along_its_path(paths: Paths) -> None:
    assert await paths.ask(10, 20) is None
    paths.link.answer()
    # A part of the path is committed, and the rest is asked about still.
    assert await paths.ask(20, committed=(10,)) == [21, 22, 23, 24, 25, 26]
    assert paths.counts() == (1, 1, 0)


async def test_a_late_answer_is_used_further_down(paths: Paths) -> None:
    assert await paths.ask(10, 20) is None
    paths.link.answer()
    assert await paths.ask(21, 22, committed=(10, 20)) == [23, 24, 25, 26]
    assert paths.counts() == (1, 1, 0)


async def test_a_late_answer_is_used_where_all_of_its_path_is_committed(paths: Paths) -> None:
    assert await paths.ask(10, 20) is None
    paths.link.answer()
    assert await paths.ask(committed=(10, 20, 21)) == [22, 23, 24, 25, 26]


async def test_an_answer_behind_the_text_is_used_behind_a_path(paths: Paths) -> None:
    assert await paths.ask() is None
    paths.link.answer()
    assert await paths.ask(5, 6) == [7, 8, 9, 10]
    assert paths.counts() == (1, 1, 0)


@pytest.mark.parametrize(
    ("path", "committed"),
    [((20,), (11,)), ((), (10, 21)), ((11, 20), ()), ((10, 20, 30), ()), ((), (10, 20, 30))],
)
async def test_where_the_text_goes_another_way_nothing_is_left(
    paths: Paths, path: tuple[int, ...], committed: tuple[int, ...]
) -> None:
    assert await paths.ask(10, 20) is None
    paths.link.answer()
    assert await paths.ask(*path, committed=committed) is None
    assert paths.counts() == (1, 0, 1)


async def test_an_answer_further_down_waits_until_it_is_asked_about(paths: Paths) -> None:
    """The path to it is not the drafter's own, so it is not proposed."""
    assert await paths.ask(10, 20) is None
    paths.link.answer()
    assert await paths.ask(10) is None
    assert await paths.ask(committed=(10,)) is None
    assert paths.counts() == (0, 0, 0)
    assert await paths.ask(20) == [21, 22, 23, 24, 25, 26]
    assert paths.counts() == (1, 1, 0)


async def test_the_newest_answer_is_the_one_that_counts(paths: Paths) -> None:
    assert await paths.ask(10, 20) is None
    paths.link.answer()
    assert await paths.ask(10, 20, 21) == [22, 23, 24, 25, 26]
    # Asked beside that, and answered since.
    paths.link.answer()
    assert await paths.ask(10, 20, 21) == [22, 23, 24, 25, 26, 27]


async def test_what_it_wishes_to_know_is_left_where_its_nodes_are_not() -> None:
    """Of any tree the most probable next tokens may be told."""
    paths = Paths()
    await paths.begin()
    assert await paths.ask(10, 20) is None
    wishing = replace(chain_proposal("far", following(20, 3)), num_top_next_tokens=4)
    paths.link.answer([wishing])
    [left] = (
        await paths.hub.exchange([], [paths.session.query()._replace(assumed=(9,))], budget_s=0.0)
    )["r"]
    assert (len(left.tokens), left.num_top_next_tokens) == (0, 4)


async def test_heads_of_the_last_stage_have_nothing_behind_a_path() -> None:
    hub = DrafterHub(
        [LocalDrafter(StageDrafts("head")), LocalDrafter(CountingDrafter())],
        LIMITS,
        clock=FakeClock(),
    )
    await hub.start()
    session = HubSession(hub)
    head = chain_proposal("head", following(4, 3))
    hub.note_drafted([Drafted("head", 0.001, (("r", 5, head),))])
    [only] = (await hub.exchange([], [session.query()._replace(assumed=(5,))]))["r"]
    assert only.source == "counting"
    both = (await hub.exchange([], [session.query()]))["r"]
    assert [one.source for one in both] == ["head", "counting"]
