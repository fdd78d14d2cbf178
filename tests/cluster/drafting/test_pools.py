"""Requests among the servers of a pool, on a clock and links that the test moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
from draftline.cluster.config import DrafterConfig
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.pool import (
    BELIEVED_S,
    FIND_PERIOD_S,
    SHUNNED,
    SILENCE_S,
    DrafterPool,
)
from draftline.cluster.links.link import DrafterLink
from draftline.core.errors import ConfigError
from draftline.core.proposals import DraftCost
from support.fakes.fake_drafters import CountingDrafter
from support.fakes.fake_link import FakeClock, FakeLink
from support.servers.hub_session import QUICK_RETRY, HubSession, until


class Scene:
    """A hub over a pool of fake links; steps do not wait, answers come when the test says."""

    def __init__(self, num_servers: int = 2) -> None:
        self.clock = FakeClock()
        self.links = [FakeLink(CountingDrafter("far", 8)) for _ in range(num_servers)]
        links: dict[str, DrafterLink] = {str(key): link for key, link in enumerate(self.links)}
        self.pool = DrafterPool("far", 256, True, links)
        self.hub = DrafterHub([self.pool], QUICK_RETRY, clock=self.clock, rng=random.Random(3))
        self.sessions: list[HubSession] = []

    async def begin(self, num_requests: int) -> None:
        await self.hub.start()
        names = [f"r{number}" for number in range(num_requests)]
        self.sessions = [HubSession(self.hub, name, prompt_len=5) for name in names]
        await asyncio.sleep(0)
        self.answer()
        await self.step()
        self.answer()

    async def step(self, count: int = 0) -> dict[str, list[int]]:
        """What is proposed in a step of all requests that commits so many tokens of each."""
        commits = [session.commit(count) for session in self.sessions] if count else []
        queries = [session.query() for session in self.sessions]
        found = await self.hub.exchange(commits, queries, None, 0.0)
        return {name: own[0].tokens.tolist() for name, own in found.items() if own}

    def answer(self, after_s: float = 0.0, links: list[FakeLink] | None = None) -> None:
        self.clock.now += after_s
        for link in self.links if links is None else links:
            if link.waiting is not None:
                link.answer()

    async def settled(self, links: list[FakeLink] | None = None) -> dict[str, list[int]]:
        """What is proposed once these have answered all that they are asked, as `step`."""
        for _ in range(4):
            await self.step()
            self.answer(links=links)
            await asyncio.sleep(0)
        return await self.step()

    def has(self, link: FakeLink) -> set[str]:
        """The requests that the drafter of a link knows."""
        drafter: CountingDrafter = link.drafter  # type: ignore[assignment]
        return set(drafter.texts)

    def expected(self) -> dict[str, list[int]]:
        return {session.request_id: session.expected(8) for session in self.sessions}


async def test_requests_are_shared_out_and_stay_where_their_state_is() -> None:
    scene = Scene()
    await scene.begin(5)
    one, other = (scene.has(link) for link in scene.links)
    assert {len(one), len(other)} == {2, 3}
    assert one.isdisjoint(other)
    for _ in range(4):
        await scene.step(1)
        scene.answer()
    assert [scene.has(link) for link in scene.links] == [one, other]
    assert await scene.step() == scene.expected()
    sent = [message for link in scene.links for message in link.sent]
    opened = [request.request_id for message in sent for request in message.opens]
    assert sorted(opened) == [f"r{number}" for number in range(5)]
    assert scene.hub.stats()[0].moved == 0
    assert scene.hub.stats()[0].servers == 2


async def test_what_ends_leaves_its_server() -> None:
    scene = Scene()
    await scene.begin(4)
    for session in scene.sessions[:2]:
        scene.hub.close(session.request_id)
    scene.sessions = scene.sessions[2:]
    await asyncio.sleep(0)
    scene.answer()
    assert {name for link in scene.links for name in scene.has(link)} == {"r2", "r3"}


async def test_a_lost_server_s_requests_are_opened_elsewhere_with_all_their_tokens() -> None:
    scene = Scene()
    await scene.begin(4)
    lost, other = scene.links
    await scene.step(3)
    lost.is_reachable = False
    lost.lose()
    assert scene.hub.stats()[0].servers == 1
    # Before the next step: what their prompts take goes on beside the target's step.
    await asyncio.sleep(0)
    other.answer()
    await asyncio.sleep(0)
    assert scene.has(other) == {"r0", "r1", "r2", "r3"} or other.waiting is not None
    assert await scene.settled([other]) == scene.expected()
    assert scene.hub.stats()[0].moved == 2
    moved = [request for message in other.sent[2:] for request in message.opens]
    assert [len(request.token_ids) for request in moved] == [8, 8]


async def test_a_silent_server_gives_up_its_requests_and_is_not_believed_later() -> None:
    scene = Scene()
    await scene.begin(4)
    silent, other = scene.links
    await scene.step(1)
    other.answer()
    scene.clock.now += SILENCE_S / 2
    await scene.step(1)
    other.answer()
    assert len(scene.has(other)) == 2, "it may only be slow"
    scene.clock.now += SILENCE_S
    await scene.step(1)
    other.answer()
    await scene.step()
    other.answer()
    assert await scene.step() == scene.expected()
    assert scene.hub.stats()[0].moved == 2
    # What it says now is of requests that it has no more.
    silent.answer()
    await scene.step(1)
    other.answer()
    await asyncio.sleep(0)
    if silent.waiting is not None:
        silent.answer()
    assert scene.has(silent) == set(), "it was told that they are closed"
    assert await scene.settled() == scene.expected()


async def test_a_server_that_is_late_again_and_again_gives_up_its_requests() -> None:
    scene = Scene()
    await scene.begin(4)
    slow, other = scene.links
    for _ in range(3):
        await scene.step(1)
        scene.answer(links=[other])
        scene.answer(after_s=0.3, links=[slow])
    await scene.step()
    assert scene.hub.stats()[0].moved == 2
    scene.answer()
    assert scene.has(other) == {"r0", "r1", "r2", "r3"}


async def test_a_server_that_was_late_is_judged_anew_when_its_time_is_over() -> None:
    scene = Scene()
    await scene.begin(4)
    slow, other = scene.links
    for _ in range(3):
        await scene.step(1)
        scene.answer(links=[other])
        scene.answer(after_s=0.3, links=[slow])
    await scene.step()
    scene.answer()
    moved = scene.hub.stats()[0].moved
    scene.clock.now += SHUNNED.first_delay_s
    scene.sessions.append(HubSession(scene.hub, "new"))
    await asyncio.sleep(0)
    for _ in range(4):
        scene.answer()
        await scene.step(1)
    assert scene.has(slow) == {"new"}
    assert scene.hub.stats()[0].moved == moved
    pooled: Any = scene.hub._clients[0]
    assert pooled._members["0"].shunned.failures == 0


async def test_where_all_servers_are_late_nothing_moves() -> None:
    scene = Scene()
    await scene.begin(4)
    for _ in range(6):
        await scene.step(1)
        scene.clock.now += 0.3
        scene.answer()
    scene.clock.now += 2 * SILENCE_S
    await scene.step(1)
    scene.clock.now += 2 * SILENCE_S
    await scene.step(1)
    assert scene.hub.stats()[0].moved == 0


async def test_a_server_that_drains_gives_up_its_requests_and_gets_no_new_ones() -> None:
    scene = Scene()
    await scene.begin(2)
    leaving, other = scene.links
    await scene.step(1)
    assert leaving.events is not None
    leaving.events.server_load(0, is_draining=True)
    scene.answer()
    await scene.step()
    scene.answer()
    await asyncio.sleep(0)
    scene.answer()
    assert (scene.has(leaving), scene.has(other)) == (set(), {"r0", "r1"})
    scene.sessions.append(HubSession(scene.hub, "new"))
    assert await scene.settled() == scene.expected()
    assert "new" in scene.has(other)


async def test_the_last_server_keeps_its_requests_whatever_it_is() -> None:
    scene = Scene(num_servers=1)
    await scene.begin(2)
    [only] = scene.links
    assert only.events is not None
    only.events.server_load(0, is_draining=True)
    scene.clock.now += 10 * SILENCE_S
    await scene.step(1)
    scene.answer()
    assert await scene.step() == scene.expected()
    assert scene.hub.stats()[0].moved == 0


async def test_without_any_server_steps_go_on_and_requests_come_when_one_is_back() -> None:
    scene = Scene()
    for link in scene.links:
        link.is_reachable = False
    await scene.hub.start()
    scene.sessions = [HubSession(scene.hub, "r")]
    assert await scene.step(1) == {}
    assert not scene.hub.stats()[0].connected
    scene.links[1].is_reachable = True
    scene.clock.now += 1.0
    assert await scene.settled() == scene.expected()


async def test_requests_of_others_count_for_as_long_as_their_news_is_new() -> None:
    scene = Scene()
    await scene.begin(2)
    full, other = scene.links
    assert full.events is not None
    full.events.server_load(6, is_draining=False)
    for name in ("a", "b", "c"):
        scene.sessions.append(HubSession(scene.hub, name))
    assert await scene.settled() == scene.expected()
    assert (len(scene.has(full)), len(scene.has(other))) == (1, 4)
    scene.answer()
    # Nothing is heard of it any more, which may be because it has nothing to say.
    scene.clock.now += BELIEVED_S + 1.0
    for name in ("d", "e", "f"):
        scene.sessions.append(HubSession(scene.hub, name))
    assert await scene.settled() == scene.expected()
    assert (len(scene.has(full)), len(scene.has(other))) == (4, 4)
    assert scene.hub.stats()[0].moved == 0


class Finder:
    """Servers that the test starts and ends."""

    def __init__(self) -> None:
        self.loads: dict[str, int] = {}
        self.links: dict[str, FakeLink] = {}
        self.num_asked = 0

    async def find(self) -> Mapping[str, int]:
        self.num_asked += 1
        if not self.loads:
            raise RuntimeError("the cluster is busy")
        return dict(self.loads)

    def link(self, key: str) -> DrafterLink:
        self.links[key] = FakeLink(CountingDrafter("far", 8))
        return self.links[key]

    async def again(self) -> None:
        """Wait until it was asked another time."""
        before = self.num_asked

        async def is_asked() -> bool:
            return self.num_asked > before

        await until(is_asked)
        await asyncio.sleep(0)


async def test_found_servers_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.cluster.drafting.pool.FIND_PERIOD_S", 0.001)
    assert FIND_PERIOD_S <= 1.0, "requests of one that is gone wait for it"
    scene, finder = Scene(0), Finder()
    scene.pool.finder = finder
    finder.loads = {"a": 10, "b": 0}
    await scene.begin(3)
    # Others have ten requests there.
    assert scene.has(finder.links["a"]) | {"r0"} == {"r0"}
    finder.loads = {"a": 10, "c": 0}
    for _ in range(3):
        await finder.again()
        await scene.step()
        scene.answer(links=[*finder.links.values()])
    assert await scene.step() == scene.expected()
    assert scene.has(finder.links["c"]) == {"r0", "r1", "r2"}
    assert "b" not in scene.pool.links
    assert scene.hub.stats()[0].moved == 3
    before = scene.hub.stats()[0].messages
    finder.loads = {}
    await finder.again()
    assert set(scene.pool.links) == {"a", "c"}, "nobody has said that they are gone"
    assert scene.hub.stats()[0].messages >= before > 0
    await scene.hub.stop()


class LateFinder(Finder):
    """Its first answer comes with its cancellation, as `asyncio.wait_for` may have it."""

    async def find(self) -> Mapping[str, int]:
        self.num_asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.num_asked > 1:
                raise
        return {"late": 0}


async def test_who_has_stopped_connects_to_nobody_found_too_late() -> None:
    scene, finder = Scene(0), LateFinder()
    scene.pool.finder = finder
    await scene.hub.start()
    [finding] = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.sleep(0)
    await scene.hub.stop()
    await asyncio.wait([finding], timeout=2.0)
    assert finding.done()
    assert not finder.links


async def test_the_cost_of_a_pool_is_that_of_servers_side_by_side() -> None:
    one, two = Scene(1), Scene(2)
    costs: list[DraftCost] = []
    for scene in (one, two):
        await scene.begin(4)
        for _ in range(8):
            await scene.step(1)
            scene.answer(after_s=0.01)
        costs.append(scene.hub.costs()["far"])
    assert 0 < costs[1].seconds(4) <= costs[0].seconds(4) * 1.01


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"address": []}, "address"),
        ({"address": ["a:1", "a:1"]}, "address"),
        ({"address": ["a:1", "b:1"], "servers": 2}, "servers"),
        ({"transport": "inproc", "servers": 2}, "servers"),
    ],
)
def test_settings_that_name_no_pool_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:"):
        DrafterConfig(**{"kind": "suffix", "transport": "grpc", **given})


def test_addresses_may_be_several() -> None:
    config = DrafterConfig(kind="suffix", transport="grpc", address=["a:1", "b:1"])
    assert config.addresses == ("a:1", "b:1")
    assert DrafterConfig(kind="suffix", transport="grpc", address="a:1").addresses == ("a:1",)
    assert not config.is_spawned
