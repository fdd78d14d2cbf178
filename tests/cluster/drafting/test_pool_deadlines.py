"""What a server of a pool that fails costs, on a clock that runs only as far as is waited for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.pool import SILENCE_S, DrafterPool
from draftline.cluster.links.link import DrafterLink, DrafterMessage, LinkEvents
from support.fakes.fake_drafters import CountingDrafter
from support.fakes.fake_link import FakeClock, FakeLink
from support.fakes.skipping_loop import run_skipping
from support.servers.hub_session import QUICK_RETRY, HubSession

DEADLINE_S, TARGET_S, ANSWER_S = 0.05, 0.02, 0.01
# What is promised.
MOVED_WITHIN_S = 1.0
NUM_REQUESTS = 4


class ServerLink(FakeLink):
    """A server that answers after `answer_s`; None: never."""

    def __init__(self) -> None:
        super().__init__(CountingDrafter("far", 8))
        self.answer_s: float | None = ANSWER_S
        self.is_draining = False

    def send(self, message: DrafterMessage) -> None:
        super().send(message)
        if self.answer_s is not None:
            asyncio.get_running_loop().call_later(self.answer_s, self._answer, message)

    def connect(self, events: LinkEvents) -> None:
        # As over a network: not before the caller goes on.
        asyncio.get_running_loop().call_soon(super().connect, events)

    def _answer(self, message: DrafterMessage) -> None:
        if self.waiting is message:
            assert self.events is not None
            self.events.server_load(0, is_draining=self.is_draining)
            self.answer()


def lose(link: ServerLink) -> None:
    link.is_reachable = False
    link.lose()


def silence(link: ServerLink) -> None:
    link.answer_s = None


def slow(link: ServerLink) -> None:
    link.answer_s = 0.3


def slow_as_can_be(link: ServerLink) -> None:
    link.answer_s = SILENCE_S - 0.01


def drain(link: ServerLink) -> None:
    link.is_draining = True


FAULTS = [lose, silence, slow, slow_as_can_be, drain]


class Run:
    """Four requests over two servers, step by step, and how long each step waited for drafts."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.links = [ServerLink(), ServerLink()]
        links: dict[str, DrafterLink] = {str(key): link for key, link in enumerate(self.links)}
        pool = DrafterPool("far", 256, True, links)
        self.hub = DrafterHub([pool], QUICK_RETRY, clock=clock, rng=random.Random(3))
        self.waits_s: list[float] = []

    async def until_well(self, sessions: list[HubSession], what: str) -> None:
        """Steps until one has right drafts for all requests."""
        for _ in range(200):
            found = await self.step(sessions)
            expected = {session.request_id: session.expected(8) for session in sessions}
            assert all(found[name] in ([], expected[name]) for name in found)
            if found == expected:
                return
        raise AssertionError(what)

    async def step(self, sessions: list[HubSession]) -> dict[str, list[int]]:
        commits = [session.commit(1) for session in sessions]
        queries = [session.query() for session in sessions]
        begun_at = self.clock.now
        found = await self.hub.exchange(commits, queries, None, DEADLINE_S)
        self.waits_s.append(self.clock.now - begun_at)
        await asyncio.sleep(TARGET_S)
        return {name: own[0].tokens.tolist() if own else [] for name, own in found.items()}

    async def measure(self, fault: Callable[[ServerLink], None]) -> float:
        """Seconds from the fault to a step with drafts of the other server for all requests."""
        await self.hub.start()
        sessions = [HubSession(self.hub, f"r{number}") for number in range(NUM_REQUESTS)]
        await self.until_well(sessions, "no drafts before the fault")
        failing, other = self.links
        fault(failing)
        failed_at = self.clock.now
        drafter: CountingDrafter = other.drafter  # type: ignore[assignment]
        while len(drafter.texts) < NUM_REQUESTS:
            await self.step(sessions)
            assert self.clock.now < failed_at + 60, "they do not move"
        await self.until_well(sessions, "no drafts after the fault")
        took_s = self.clock.now - failed_at
        await self.hub.stop()
        return took_s


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_have_drafts_of_another_server_within_a_second(
    fault: Callable[[ServerLink], None],
) -> None:
    clock = FakeClock()
    assert run_skipping(clock, Run(clock).measure(fault)) <= MOVED_WITHIN_S


@pytest.mark.parametrize("fault", FAULTS)
def test_no_step_waits_longer_than_the_deadline(fault: Callable[[ServerLink], None]) -> None:
    clock = FakeClock()
    run = Run(clock)
    run_skipping(clock, run.measure(fault))
    assert max(run.waits_s) <= DEADLINE_S + 1e-9
    assert len(run.waits_s) > 2
