"""Drafters by the clock of the simulation: of the host, or beside it on a device of their own."""

from __future__ import annotations

import asyncio

from ....cluster.config import DrafterConfig, EngineConfig
from ....cluster.drafting.factory import build_drafter, keeps_answers
from ....cluster.links.link import DrafterMessage, DraftSeconds, InprocLink
from ....cluster.links.pool import AnyLink
from ....measure.simulate.cost_profile import CostProfile
from ....measure.simulate.draft_times import DraftTimes, times_of
from ....measure.simulate.host_clock import HostClock
from ....measure.simulate.slowed_link import SlowedLink


class ApartLink(SlowedLink):
    """Of a drafter on a device of its own: it drafts in this process and at once; the answer comes
    when the profile's drafter would have given it, and the engine goes on meanwhile.
    """

    def __init__(self, link: AnyLink, times: DraftTimes, clock: HostClock) -> None:
        assert times.are_known, "its time is the profile's"
        super().__init__(link, times, clock)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_local(self) -> bool:
        """See `DrafterLink`."""
        return False

    def send(self, message: DrafterMessage) -> None:
        """See `DrafterLink`."""
        sent_at = self._host_clock()
        answer = self._drafted(message)
        if answer is None:
            return
        assert self._events is not None
        seconds = self._draft_s(answer.proposals)
        self._timer = asyncio.get_running_loop().call_at(
            max(sent_at + seconds, self._host_clock()),
            self._events.answered,
            answer.proposals,
            answer.report,
            DraftSeconds(propose_s=seconds),
        )

    def disconnect(self) -> None:
        """See `DrafterLink`."""
        if self._timer is not None:
            self._timer.cancel()
        super().disconnect()


def link_to(
    config: DrafterConfig, engine: EngineConfig, clock: HostClock, profile: CostProfile
) -> SlowedLink:
    """A new drafter of these settings; those that the profile has work beside the host."""
    drafter = build_drafter(config, engine)
    link = InprocLink(drafter, config.max_nodes, keeps_answers=keeps_answers(config))
    times = times_of(config, profile)
    if times.are_known:
        return ApartLink(link, times, clock)
    return SlowedLink(link, times, clock)
