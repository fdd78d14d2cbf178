"""Late, dead and silent drafters, on a clock and a link that the test moves."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from draftline.cluster.drafting.drafter_client import PATIENCE
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.drafting.replies import DrafterLimits
from draftline.cluster.links.failures import RetryPolicy
from draftline.cluster.links.grpc_link import GrpcLink
from support.fakes.fake_drafters import VOCAB_SIZE, CountingDrafter, SlowDrafter
from support.fakes.fake_link import FakeClock, FakeLink
from support.servers.hub_session import HubSession, until

LIMITS = DrafterLimits(
    vocab_size=VOCAB_SIZE,
    answer_timeout_s=2.0,
    max_backlog=3,
    retry=RetryPolicy(tolerated=1, first_delay_s=1.0, max_delay_s=8.0),
)


class Scene:
    """A hub over one fake link; steps do not wait, answers come when the test says."""

    def __init__(self, num_tokens: int = 8) -> None:
        self.clock = FakeClock()
        self.link = FakeLink(CountingDrafter("far", num_tokens))
        self.hub = DrafterHub([self.link], LIMITS, clock=self.clock, rng=random.Random(3))

    async def session(self) -> HubSession:
        await self.hub.start()
        session = HubSession(self.hub)
        await asyncio.sleep(0)
        self.link.answer()
        return session


async def step(session: HubSession, count: int = 0) -> list[int] | None:
    """Tokens of the only proposal of a step that does not wait, if there is one."""
    found = await session.step(count, budget_s=0.0, max_nodes=8)
    return found[0].tokens.tolist() if found else None


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_late_proposal_is_used_re_rooted(scene: Scene):
    session = await scene.session()
    assert await step(session) is None
    scene.link.answer()
    assert await step(session, 3) == session.expected(5)
    stats = scene.hub.stats()[0]
    assert (stats.late, stats.late_used, stats.proposals, stats.dropped) == (1, 1, 1, 0)


async def test_a_late_proposal_that_fits_no_more_is_dropped(scene: Scene):
    session = await scene.session()
    await step(session)
    scene.link.answer()
    assert await step(session, 9) is None
    stats = scene.hub.stats()[0]
    assert (stats.late, stats.late_used, stats.proposals, stats.dropped) == (1, 0, 0, 1)


async def test_a_newer_proposal_replaces_a_late_one(scene: Scene):
    session = await scene.session()
    await step(session)
    await step(session, 2)
    # The first answer lets the second message go, which is answered before the next step.
    scene.link.answer()
    scene.link.answer()
    assert await step(session, 1) == session.expected(7)
    assert scene.hub.stats()[0].dropped == 1


async def test_a_busy_drafter_gets_what_it_missed_in_one_message(scene: Scene):
    session = await scene.session()
    await step(session)
    num_sent = len(scene.link.sent)
    for _ in range(3):
        await step(session, 1)
    assert len(scene.link.sent) == num_sent
    scene.link.answer()
    (message,) = scene.link.sent[num_sent:]
    # Of three steps, in one piece.
    assert [(commit.base_len, len(commit.tokens)) for commit in message.commits] == [(5, 3)]
    assert [query.committed_len for query in message.queries] == [8]
    scene.link.answer()
    assert await step(session) == session.expected(8)


async def test_a_drafter_that_is_left_out_hears_nothing_and_catches_up_in_one_piece(scene: Scene):
    session = await scene.session()
    await step(session)
    scene.link.answer()
    await step(session, 1)
    scene.link.answer()
    num_sent = len(scene.link.sent)
    for _ in range(50):
        await scene.hub.exchange([session.commit(2)], [session.query()], {}, 0.0)
    assert len(scene.link.sent) == num_sent
    assert await step(session, 1) is None
    (message,) = scene.link.sent[num_sent:]
    assert [(commit.base_len, len(commit.tokens)) for commit in message.commits] == [(6, 101)]
    assert not message.opens
    scene.link.answer()
    assert await step(session) == session.expected(8)


async def test_a_request_is_opened_when_it_is_first_asked_for(scene: Scene):
    await scene.hub.start()
    sessions = [HubSession(scene.hub, name, at_once=()) for name in ("one", "two")]
    for _ in range(3):
        commits = [session.commit(1) for session in sessions]
        await scene.hub.exchange(commits, [], {}, 0.0)
    assert scene.link.sent == []
    queries = [session.query() for session in sessions]
    await scene.hub.exchange([], queries, {"far": {"two"}}, 0.0)
    (message,) = scene.link.sent
    assert [request.request_id for request in message.opens] == ["two"]
    assert message.opens[0].token_ids.tolist() == sessions[1].text
    assert message.opens[0].prompt_len == 5
    scene.link.answer()
    # Who learns from what ends is told of the other one then, too.
    scene.hub.close("one", [sessions[0].commit(2)])
    await asyncio.sleep(0)
    assert scene.link.sent[-1].opens[0].token_ids.tolist() == sessions[0].text
    scene.link.answer()
    assert scene.link.sent[-1].closes == ("one",)
    assert scene.link.sent[-1].opens == ()


async def test_a_drafter_that_keeps_no_answers_never_hears_of_requests_that_it_was_not_asked_for():
    link = FakeLink(CountingDrafter("far"))
    link.keeps_answers = False
    hub = DrafterHub([link], LIMITS, clock=FakeClock())
    await hub.start()
    session = HubSession(hub, at_once=())
    await hub.exchange([session.commit(1)], [session.query()], {}, 0.0)
    hub.close("r", [session.commit(1)])
    await asyncio.sleep(0)
    assert link.sent == []
    session = HubSession(hub)
    await session.step(1, budget_s=0.0)
    link.answer()
    hub.close("r", [session.commit(1)])
    await asyncio.sleep(0)
    assert (link.sent[-1].closes, link.sent[-1].last_commits) == (("r",), [])


async def test_what_waits_for_a_drafter_that_learns_is_bounded(scene: Scene):
    session = await scene.session()
    await step(session)
    for index in range(LIMITS.max_backlog + 1):
        HubSession(scene.hub, f"r{index}", at_once=())
        scene.hub.close(f"r{index}")
    scene.link.answer()
    assert not any(message.opens for message in scene.link.sent[2:])
    await step(session, 1)
    scene.link.answer()
    assert await step(session) == session.expected(8)


async def test_a_request_that_ended_gets_no_late_proposal(scene: Scene):
    session = await scene.session()
    await step(session)
    scene.hub.close("r")
    again = HubSession(scene.hub, prompt_len=9)
    # The answer to the old request of the same id.
    scene.link.answer()
    assert await step(again) is None
    assert scene.link.sent[-1].closes == ("r",)
    scene.link.answer()
    scene.link.answer()
    assert await step(again) == again.expected(8)


async def test_silence_ends_the_connection_and_the_drafter_comes_back_with_all_tokens(scene: Scene):
    session = await scene.session()
    await step(session)
    scene.clock.now += 1.9
    await step(session, 1)
    assert scene.hub.stats()[0].errors == 0
    scene.clock.now += 0.2
    await step(session, 2)
    stats = scene.hub.stats()[0]
    assert (stats.errors, stats.connected) == (1, False)
    assert scene.link.num_unanswered == 1
    # The first failure is tolerated: the next step connects again.
    await step(session, 1)
    scene.link.answer()
    (opened,) = scene.link.sent[-1].opens
    assert opened.token_ids.tolist() == session.text
    assert opened.prompt_len == 5
    assert await step(session) == session.expected(8)
    assert scene.hub.stats()[0].reconnects == 1


async def test_the_breaker_spaces_attempts(scene: Scene):
    session = await scene.session()
    scene.link.is_reachable = False
    scene.link.lose()
    attempts: list[float] = []
    start = scene.clock.now
    for _ in range(400):
        before = scene.link.num_connects
        await step(session, 1)
        if scene.link.num_connects > before:
            attempts.append(scene.clock.now - start)
        scene.clock.now += 0.1
    assert attempts[0] == 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert len(attempts) < 12
    stats = scene.hub.stats()[0]
    assert (stats.connected, stats.circuit_open) == (False, True)
    for gap, longest in zip(gaps, [1.0, 2.0, 4.0, 8.0, 8.0], strict=False):
        assert longest / 2 <= gap <= longest + 0.11
    scene.link.is_reachable = True
    scene.clock.now += 8.0
    await step(session)
    scene.link.answer()
    assert await step(session) == session.expected(8)


async def test_a_lost_connection_takes_waiting_messages_with_it(scene: Scene):
    session = await scene.session()
    await step(session)
    scene.link.lose()
    for _ in range(3):
        await step(session, 1)
        if scene.link.waiting:
            scene.link.answer()
    assert await step(session) == session.expected(8)


async def test_a_step_stops_waiting_when_the_answer_is_there(scene: Scene):
    session = await scene.session()
    stepping = asyncio.create_task(session.step(2, budget_s=60.0))
    await until(scene.link.sent_one, pause_s=0)
    scene.link.answer()
    (proposal,) = await stepping
    assert proposal.tokens.tolist() == session.expected(8)


async def test_a_step_stops_waiting_when_the_drafter_dies(scene: Scene):
    session = await scene.session()
    stepping = asyncio.create_task(session.step(2, budget_s=60.0))
    await until(scene.link.sent_one, pause_s=0)
    scene.link.lose()
    assert await stepping == []


async def test_a_cancelled_step_leaves_the_hub_whole(scene: Scene):
    session = await scene.session()
    stepping = asyncio.create_task(session.step(2, budget_s=60.0))
    await until(scene.link.sent_one, pause_s=0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    scene.link.answer()
    assert await step(session, 1) == session.expected(7)


async def test_a_drafter_slower_than_the_budget_is_not_waited_for(scene: Scene):
    session = await scene.session()
    await step(session)
    scene.clock.now += 1.5
    scene.link.answer()
    (proposal,) = await session.step(1, budget_s=0.05)
    assert proposal.tokens.tolist() == session.expected(7)
    (channel,) = scene.hub._clients
    assert not channel.is_awaited
    # A quick answer is forgiven at once.
    scene.link.answer()
    await session.step(1, budget_s=0.05)
    assert channel.is_awaited


async def test_a_query_of_an_earlier_life_is_not_sent(scene: Scene):
    session = await scene.session()
    await step(session)
    await step(session, 1)
    scene.hub.close("r")
    again = HubSession(scene.hub, prompt_len=9)
    scene.link.answer()
    assert scene.link.sent[-1].queries == []
    assert await step(again) is None


async def test_local_drafters_answer_while_a_remote_one_is_silent():
    remote = FakeLink(CountingDrafter("far"))
    hub = DrafterHub([remote, LocalDrafter(CountingDrafter("near"))], LIMITS, clock=FakeClock())
    await hub.start()
    session = HubSession(hub)
    await asyncio.sleep(0)
    remote.answer()
    found = await session.step(0, budget_s=0.01)
    assert [proposal.source for proposal in found] == ["near"]
    remote.answer()
    found = await session.step(1, budget_s=0.01)
    assert [proposal.source for proposal in found] == ["far", "near"]


async def test_nothing_is_sent_after_the_end():
    """A request that ends with the engine is not told of: its link is closed."""
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    hub = DrafterHub([LocalDrafter(CountingDrafter("near"))], LIMITS, clock=FakeClock())
    await hub.start()
    session = HubSession(hub)
    await session.step(0, budget_s=0.01)
    hub.close(session.request_id)
    await hub.stop()
    await asyncio.sleep(0.01)
    assert errors == []


async def test_a_slow_server_is_late_and_then_used_re_rooted(serve):
    drafter = SlowDrafter(0.1)
    hub = DrafterHub([GrpcLink("slow", await serve(drafter))], LIMITS)
    await hub.start()
    session = HubSession(hub)
    assert await session.step(0, budget_s=0.01) == []

    async def answered() -> int:
        return hub.stats()[0].latency_count

    # Nothing is committed while the answer is on its way, so that it must be re-rooted by one.
    await until(answered)
    found = await session.step(1, budget_s=0.0)
    assert [proposal.tokens.tolist() for proposal in found] == [session.expected(7)]
    assert hub.stats()[0].late == 1
    await hub.stop()


async def test_one_that_seemed_too_slow_is_waited_for_again(scene: Scene):
    session = await scene.session()
    (channel,) = scene.hub._clients
    waited_for = []
    for _ in range(2 * PATIENCE):
        asking = asyncio.create_task(session.step(1, budget_s=0.01))
        await asyncio.sleep(0.003)
        waited_for.append(channel.is_awaited)
        scene.clock.now += 1.0
        scene.link.answer()
        await asking
    # Before it is known to be slow, and then once in so many queries.
    assert waited_for.count(True) == 3
    assert waited_for[0]
