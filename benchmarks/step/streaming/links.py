"""Drafters by the clock of the simulation: of the host, or beside it on a device of their own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ....cluster.config import HEAD, DrafterConfig, EngineConfig
from ....cluster.drafting.factory import build_drafter, keeps_answers
from ....cluster.drafting.head_features import head_folder
from ....cluster.links.link import (
    DrafterMessage,
    DrafterReport,
    DrafterSession,
    DraftSeconds,
    InprocLink,
)
from ....core.proposals import Proposal
from ....measure.simulate.cost_profile import CostProfile
from ....measure.simulate.draft_times import draft_seconds, head_kind
from ....measure.simulate.host_clock import HostClock
from ....measure.simulate.slowed_link import SlowedLink

MODEL = "model"


def link_to(
    config: DrafterConfig, engine: EngineConfig, clock: HostClock, profile: CostProfile
) -> InprocLink | DeviceLink:
    """A new drafter of these settings."""
    link = HostLink(config, engine, clock)
    if config.kind == HEAD:
        return DeviceLink(link, head_kind(head_folder(config)), clock, profile)
    return DeviceLink(link, MODEL, clock, profile) if config.kind == MODEL else link


class HostLink(InprocLink):
    """Takes the time of the host."""

    def __init__(self, config: DrafterConfig, engine: EngineConfig, clock: HostClock) -> None:
        drafter = build_drafter(config, engine)
        super().__init__(drafter, config.max_nodes, keeps_answers=keeps_answers(config))
        self._session = DrafterSession(drafter, clock=clock)

    def send(self, message: DrafterMessage, is_over: Callable[[], bool] = lambda: False) -> None:
        """See `InprocLink`. Drafters have another clock than the deadline is of."""
        super().send(replace(message, deadline=math.inf), is_over)


class DeviceLink(SlowedLink):
    """A drafter on a device of its own: the host goes on until the profile's would have drafted."""

    def __init__(self, link: HostLink, kind: str, clock: HostClock, profile: CostProfile) -> None:
        super().__init__(link, kind, profile)
        self._host_clock = clock
        self._answer: asyncio.TimerHandle | None = None

    @property
    def is_local(self) -> bool:
        """See `DrafterLink`."""
        return False

    def send(self, message: DrafterMessage) -> None:
        """See `DrafterLink`."""
        with self._host_clock.stopped():
            super().send(message)

    def disconnect(self) -> None:
        """See `DrafterLink`."""
        if self._answer is not None:
            self._answer.cancel()
        super().disconnect()

    def answered(
        self,
        proposals: Sequence[Proposal],
        report: DrafterReport | None = None,
        seconds: DraftSeconds | None = None,  # noqa: ARG002 - the profile tells them
    ) -> None:
        """Pass the answer on when the profile's drafter has it."""
        assert self._events is not None
        num_passes = self._passes_so_far - self._passes_before
        took = draft_seconds(self._profile, self.kind, proposals, 0.0, num_passes)
        self._answer = asyncio.get_running_loop().call_later(
            took, self._events.answered, proposals, report, DraftSeconds(propose_s=took)
        )
