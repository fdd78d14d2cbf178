"""A drafter server ends drafting ahead, between two passes, for whatever else arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.links.grpc_link import GrpcLink
from draftline.core.proposals import AheadQuery
from support.fakes.fake_drafters import GuessingDrafter, following
from support.servers.hub_session import LIMITS, HubSession

PASSES = 500


class SlowGuesses(GuessingDrafter):
    """Takes a pass for each of many guesses, the right one first; says when it has begun."""

    def __init__(self) -> None:
        super().__init__("far")
        self.begun = threading.Event()
        self.num_passes = 0
        self.on_pass = self._pass

    def _pass(self) -> None:
        self.num_passes += 1
        self.begun.set()
        threading.Event().wait(0.02)

    def guess(self, session: HubSession) -> None:
        right = following(session.text[-1], 2).tolist()
        self.guesses = [right, *([40, index % 50] for index in range(PASSES))]
        self.num_passes = 0
        self.begun.clear()


async def hub_over(address: str) -> DrafterHub:
    hub = DrafterHub([GrpcLink("far", address)], LIMITS)
    await hub.start()
    assert hub.drafts_ahead
    return hub


async def go_ahead(hub: DrafterHub, session: HubSession, drafter: SlowGuesses) -> None:
    """Ask ahead, and wait until the drafter is at it."""
    drafter.guess(session)
    tree = following(session.text[-1], 1), np.array([-1], dtype=np.int32)
    query = AheadQuery(session.request_id, len(session.text), 4, *tree)
    hub.draft_ahead([query], {"far": (session.request_id,)})
    assert await asyncio.to_thread(drafter.begun.wait, 10)


async def test_the_engine_s_own_query_ends_it(
    serve: Callable[[SlowGuesses], Awaitable[str]],
) -> None:
    drafter = SlowGuesses()
    hub = await hub_over(await serve(drafter))
    session = HubSession(hub)
    for _ in range(2):
        await session.step()
        await go_ahead(hub, session, drafter)
        # The guess is right, and the others are left.
        [proposal] = await session.step(2)
        assert proposal.tokens.tolist() == session.expected(4)
        assert drafter.num_passes < PASSES
        await go_ahead(hub, session, drafter)
        [proposal] = await session.step(3)
        assert proposal.tokens.tolist() == session.expected(3)
    [stats] = hub.stats()
    assert (stats.ahead, stats.ahead_used, stats.errors) == (4, 4, 0)
    await hub.stop()


async def test_other_coordinators_queries_end_it(
    serve: Callable[[SlowGuesses], Awaitable[str]],
) -> None:
    drafter = SlowGuesses()
    address = await serve(drafter)
    hubs = [await hub_over(address) for _ in range(2)]
    sessions = [HubSession(hub) for hub in hubs]
    for session in sessions:
        await session.step()
    await go_ahead(hubs[0], sessions[0], drafter)
    [proposal] = await sessions[1].step(1)
    assert proposal.tokens.tolist() == sessions[1].expected(4)
    assert drafter.num_passes < PASSES
    for hub in hubs:
        await hub.stop()


async def test_a_connection_that_is_lost_leaves_nothing_that_waits(
    serve: Callable[[SlowGuesses], Awaitable[str]],
) -> None:
    drafter = SlowGuesses()
    address = await serve(drafter)
    lost, hub = await hub_over(address), await hub_over(address)
    session, other = HubSession(hub), HubSession(lost)
    await session.step()
    await other.step()
    await go_ahead(hub, session, drafter)
    asking = asyncio.create_task(other.step(1))
    await asyncio.sleep(0)
    await lost.stop()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    [proposal] = await session.step(2)
    assert proposal.tokens.tolist() == session.expected(4)
    # The next one is not ended before it begins.
    await go_ahead(hub, session, drafter)
    await hub.stop()
