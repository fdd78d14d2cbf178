"""Drafts of assumed tokens: used where the target said them, asked for anew where it did not."""

from __future__ import annotations

import asyncio
import random

import pytest
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.stats import DrafterStats
from draftline.core.proposals import Proposal, Query
from support.fakes.fake_drafters import CountingDrafter, following
from support.fakes.fake_link import FakeClock, FakeLink
from support.servers.hub_session import LIMITS, HubSession

ASKED = {"far": ("r",)}


class Ahead:
    """A hub over one link whose drafter drafts ahead, and a request."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.link = FakeLink(CountingDrafter("far"))
        self.link.drafts_ahead = True
        self.hub = DrafterHub([self.link], LIMITS, clock=self.clock, rng=random.Random(3))

    async def begin(self) -> HubSession:
        """A session whose first drafts are there, and in a step."""
        await self.hub.start()
        session = HubSession(self.hub)
        await asyncio.sleep(0)
        self.link.answer()
        step = asyncio.create_task(session.step())
        await self.answered()
        await step
        return session

    def go_ahead(self, session: HubSession, assumed: tuple[int, ...]) -> None:
        query = Query(session.request_id, len(session.text), 9, assumed)
        self.hub.draft_ahead([query], ASKED)

    async def answered(self) -> None:
        """Answer what is sent within some turns of the loop."""
        for _ in range(20):
            await asyncio.sleep(0)
            if self.link.waiting is not None:
                self.link.answer()

    @property
    def stats(self) -> DrafterStats:
        return self.hub.stats()[0]


@pytest.fixture
async def scene() -> Ahead:
    return Ahead()


def tokens_of(found: list[Proposal]) -> list[int] | None:
    return found[0].tokens.tolist() if found else None


def coming(session: HubSession, count: int) -> tuple[int, ...]:
    """The tokens that the text will have next."""
    return tuple(following(session.text[-1], count).tolist())


async def test_a_draft_behind_the_right_tokens_is_used_and_nobody_asked(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 2))
    scene.link.answer()
    sent = len(scene.link.sent)
    # Two assumed tokens and the bonus token, which the draft begins with.
    found = await session.step(3)
    assert tokens_of(found) == session.expected(3)
    assert len(scene.link.sent) == sent
    assert (scene.stats.ahead, scene.stats.ahead_used) == (1, 1)


async def test_where_the_target_said_others_the_drafter_is_asked(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, (47, 48))
    scene.link.answer()
    step = asyncio.create_task(session.step(3))
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)
    assert (scene.stats.ahead, scene.stats.ahead_used) == (1, 0)


async def test_one_on_its_way_is_waited_for_if_it_may_fit(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 2))
    sent = len(scene.link.sent)
    step = asyncio.create_task(session.step(3))
    await asyncio.sleep(0)
    assert scene.link.waiting is not None
    await scene.answered()
    assert tokens_of(await step) == session.expected(3)
    assert len(scene.link.sent) == sent


async def test_one_that_was_hoped_for_in_vain_is_asked_for_anew(scene: Ahead) -> None:
    """The tokens were right, and the draft behind them wrong."""
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 2))
    step = asyncio.create_task(session.step(3))
    await asyncio.sleep(0)
    wrong = scene.link.drafter.propose([Query("r", len(session.text) - 3, 4, (30,))])
    scene.link.answer(wrong)
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)


async def test_what_was_hoped_for_is_not_asked_of_a_text_that_has_grown(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 2))
    assert await session.step(3, budget_s=0.0) == []
    # A step that asks nobody goes by before the draft comes, and it is wrong.
    await scene.hub.exchange([session.commit(1)], ())
    scene.link.answer(scene.link.drafter.propose([Query("r", len(session.text) - 4, 4, (30,))]))
    assert scene.link.waiting is None
    step = asyncio.create_task(session.step(1))
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)
    assert scene.stats.errors == 0


async def test_a_drafter_that_is_busy_is_not_asked_to_go_ahead(scene: Ahead) -> None:
    session = await scene.begin()
    assert await session.step(1, budget_s=0.0) == []
    sent = len(scene.link.sent)
    scene.go_ahead(session, coming(session, 2))
    assert len(scene.link.sent) == sent


async def test_a_request_that_ends_takes_its_drafts_along(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 2))
    scene.hub.close(session.request_id)
    scene.link.answer()
    again = HubSession(scene.hub)
    step = asyncio.create_task(again.step(3))
    await scene.answered()
    assert tokens_of(await step) == again.expected(4)


async def test_a_drafter_that_is_lost_meanwhile_is_opened_anew(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 2))
    scene.link.lose()
    scene.clock.now += 1
    step = asyncio.create_task(session.step(3))
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)
    assert scene.stats.reconnects == 1


async def test_only_those_that_were_asked_go_ahead(scene: Ahead) -> None:
    session = await scene.begin()
    sent = len(scene.link.sent)
    scene.hub.draft_ahead([Query("r", len(session.text), 9, ())], {"other": ("r",)})
    assert len(scene.link.sent) == sent
    assert scene.hub.drafts_ahead
