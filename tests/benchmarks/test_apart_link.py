"""A drafter of its own device, by the clock of a simulation."""

from __future__ import annotations

import pytest
from draftline.benchmarks.step.streaming.run import ApartLink
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.measure.simulate.cost_profile import read_cost_profile
from draftline.measure.simulate.draft_times import DraftTimes
from draftline.measure.simulate.host_clock import HostClock, HostLoop
from support.fakes.fake_drafters import CountingDrafter
from support.servers.hub_session import LIMITS, HubSession


def test_its_answer_comes_when_the_profile_s_drafter_would_have_it() -> None:
    profile = read_cost_profile("8b-h100")
    # This machine's own work takes next to no time.
    clock = HostClock(1e6)
    link = ApartLink(
        LocalDrafter(CountingDrafter("griffin", 4)), DraftTimes(profile, "griffin"), clock
    )
    hub = DrafterHub([link], LIMITS, clock=clock)
    assert hub.remote == {"griffin"}

    async def draft() -> None:
        await hub.start()
        session = HubSession(hub)
        began_at = clock()
        [proposal] = await session.step(1)
        assert proposal.tokens.tolist() == session.expected(4)
        assert clock() - began_at == pytest.approx(profile.draft_s("griffin", 4, 1), rel=5e-2)
        await hub.stop()

    loop = HostLoop(clock)
    try:
        loop.run_until_complete(draft())
    finally:
        loop.close()
