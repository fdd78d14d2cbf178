"""What is drafted while the target computes: used where it guessed what the target says, asked for
anew where it did not.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from draftline.cluster.drafting.channel import PATIENCE
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.stats import DrafterStats
from draftline.core.proposals import AheadQuery, Proposal
from support.fakes.fake_drafters import GuessingDrafter, following
from support.fakes.fake_link import FakeClock, FakeLink
from support.servers.hub_session import LIMITS, HubSession

ASKED = {"far": ("r",)}


class Ahead:
    """A hub over one link whose drafter drafts ahead, and a request."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.drafter = GuessingDrafter("far")
        self.link = FakeLink(self.drafter)
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

    def go_ahead(self, session: HubSession, *guesses: tuple[int, ...]) -> None:
        """Ask about a step of four tokens; these are what the drafter will guess."""
        self.drafter.guesses = [list(guess) for guess in guesses]
        tokens, parents = following(session.text[-1], 4), np.arange(-1, 3, dtype=np.int32)
        query = AheadQuery(session.request_id, len(session.text), 9, tokens, parents)
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


async def test_of_several_guesses_the_right_one_is_used_and_nobody_asked(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, (40,), coming(session, 3), (*coming(session, 2), 40))
    [query] = scene.link.sent[-1].ahead
    assert query.tokens.tolist() == list(coming(session, 4))
    scene.link.answer()
    sent = len(scene.link.sent)
    assert tokens_of(await session.step(3)) == session.expected(4)
    assert len(scene.link.sent) == sent
    assert (scene.stats.ahead, scene.stats.ahead_used) == (1, 1)
    assert scene.link.num_hurried == 0


async def test_where_the_target_said_another_the_drafter_is_asked(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, (47, 48), (*coming(session, 2), 40))
    scene.link.answer()
    step = asyncio.create_task(session.step(3))
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)
    assert (scene.stats.ahead, scene.stats.ahead_used) == (1, 0)


async def test_what_goes_on_from_the_tree_itself_is_of_use(scene: Ahead) -> None:
    """The target may say less than was guessed, where a stop rule cut the step."""
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 3))
    scene.link.answer()
    assert tokens_of(await session.step(2)) == session.expected(5)


async def test_what_is_on_its_way_is_hurried_once_and_used_as_far_as_it_is_there(
    scene: Ahead,
) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 3))
    sent = len(scene.link.sent)
    scene.drafter.num_tokens = 1
    step = asyncio.create_task(session.step(3))
    await asyncio.sleep(0)
    assert scene.link.waiting is not None
    assert scene.link.num_hurried == 1
    await scene.answered()
    assert tokens_of(await step) == session.expected(1)
    assert len(scene.link.sent) == sent
    assert scene.link.num_hurried == 1


async def test_what_was_hoped_for_in_vain_is_asked_for_anew(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, (40,))
    step = asyncio.create_task(session.step(3))
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)
    assert scene.link.num_hurried == 1


async def test_what_was_hoped_for_is_not_asked_of_a_text_that_has_grown(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, (40,))
    assert await session.step(3, budget_s=0.0) == []
    # A step that asks nobody goes by before the draft comes, and it is wrong.
    await scene.hub.exchange([session.commit(1)], ())
    scene.link.answer()
    assert scene.link.waiting is None
    step = asyncio.create_task(session.step(1))
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)
    assert scene.stats.errors == 0


async def test_other_requests_hurry_it_too(scene: Ahead) -> None:
    session = await scene.begin()
    other = HubSession(scene.hub, "other")
    await scene.answered()
    scene.go_ahead(session, coming(session, 3))
    step = asyncio.create_task(other.step())
    await asyncio.sleep(0)
    assert scene.link.num_hurried == 1
    await scene.answered()
    assert tokens_of(await step) == other.expected(4)
    assert tokens_of(await session.step(3)) == session.expected(4)


async def test_one_that_is_hurried_in_vain_fails_in_time(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 3))
    # However long it takes while nobody wants it.
    scene.clock.now += 60
    for _ in range(3):
        assert await session.step(1, budget_s=0.0) == []
        assert scene.stats.errors == 0
        scene.clock.now += 0.9 * LIMITS.answer_timeout_s / 2
    assert await session.step(1, budget_s=0.0) == []
    assert (scene.link.num_unanswered, scene.stats.errors) == (1, 1)


async def test_a_drafter_that_is_busy_is_not_asked_to_go_ahead(scene: Ahead) -> None:
    session = await scene.begin()
    assert await session.step(1, budget_s=0.0) == []
    sent = len(scene.link.sent)
    scene.go_ahead(session, coming(session, 2))
    assert len(scene.link.sent) == sent


async def test_a_request_that_ends_takes_its_drafts_along(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 3))
    scene.hub.close(session.request_id)
    scene.link.answer()
    again = HubSession(scene.hub)
    step = asyncio.create_task(again.step(3))
    await scene.answered()
    assert tokens_of(await step) == again.expected(4)


async def test_a_drafter_that_is_lost_meanwhile_is_opened_anew(scene: Ahead) -> None:
    session = await scene.begin()
    scene.go_ahead(session, coming(session, 3))
    scene.link.lose()
    scene.clock.now += 1
    step = asyncio.create_task(session.step(3))
    await scene.answered()
    assert tokens_of(await step) == session.expected(4)
    assert scene.stats.reconnects == 1


async def test_only_those_that_were_asked_go_ahead(scene: Ahead) -> None:
    session = await scene.begin()
    sent = len(scene.link.sent)
    query = AheadQuery("r", len(session.text), 9, following(1, 0), following(1, 0))
    scene.hub.draft_ahead([query], {"other": ("r",)})
    assert len(scene.link.sent) == sent
    assert scene.hub.drafts_ahead
    assert scene.hub.remote == {scene.link.name}


async def test_one_that_seemed_too_slow_is_waited_for_again_whatever_it_was_asked_ahead(
    scene: Ahead,
) -> None:
    session = await scene.begin()
    (channel,) = scene.hub._channels
    waited_for = []
    for _ in range(2 * PATIENCE):
        scene.go_ahead(session, (47, 48))
        scene.link.answer()
        step = asyncio.create_task(session.step(1, budget_s=0.01))
        await asyncio.sleep(0.003)
        waited_for.append(channel.is_awaited)
        scene.clock.now += 1.0
        await scene.answered()
        await step
    # Before it is known to be slow, and then once in so many queries.
    assert waited_for.count(True) == 3
    assert waited_for[0]
