"""A link to a drafter of this process, with the times of a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...cluster.links.link import (
    DrafterMessage,
    DrafterReport,
    DraftSeconds,
    InprocLink,
    LinkEvents,
)
from ...cluster.links.pool import AnyLink
from ...core.errors import DrafterError
from ...core.interfaces import AheadDrafter
from ...core.proposals import Proposal
from .draft_clock import DraftClock, PassCounter
from .draft_times import DraftTimes
from .host_clock import HostClock


class Answer(NamedTuple):
    """An answer of a drafter; see `LinkEvents`."""

    proposals: Sequence[Proposal]
    report: DrafterReport | None
    seconds: DraftSeconds | None


class SlowedLink:
    """Wraps a link, and delivers its answers when the profile's drafter would: the real draft runs
    while the clock is paused. Drafters outside the profile use the host's time.

    kind  the drafter's name in the profile
    """

    def __init__(self, link: AnyLink, times: DraftTimes, clock: HostClock) -> None:
        assert isinstance(link, InprocLink), "an engine over a profile has its drafters in process"
        self._link = link
        self.times = times
        self._host_clock = clock
        self._is_timed = times.are_known
        self._draft_clock = DraftClock(clock, times.pass_s, lambda: self._passes_so_far)
        self._passes = link.drafter if isinstance(link.drafter, PassCounter) else None
        self._keeps_time = self._passes is not None and self._is_timed
        if self._passes is not None and self._is_timed:
            self._passes.clock = self._draft_clock
        link.session.clock = clock
        self._events: LinkEvents | None = None
        self._answer: Answer | None = None
        self._passes_before = 0

    @property
    def name(self) -> str:
        """See `DrafterLink`."""
        return self._link.name

    @property
    def is_local(self) -> bool:
        """See `DrafterLink`."""
        return True

    @property
    def learning_counts(self) -> Mapping[str, int] | None:
        """See `DrafterLink`."""
        return self._link.learning_counts

    @property
    def max_nodes(self) -> int:
        """See `DrafterLink`."""
        return self._link.max_nodes

    @property
    def keeps_answers(self) -> bool:
        """See `DrafterLink`."""
        return self._link.keeps_answers

    @property
    def reads_features(self) -> bool:
        """See `DrafterLink`."""
        return self._link.reads_features

    @property
    def ahead(self) -> AheadDrafter | None:
        """See `DrafterLink`."""
        return self._link.ahead

    def connect(self, events: LinkEvents) -> None:
        """See `DrafterLink`."""
        self._events = events
        self._link.connect(self)

    def send(self, message: DrafterMessage) -> None:
        """See `DrafterLink`."""
        assert self._events is not None
        if not self._keeps_time:
            # The drafter's clock differs from that of the deadline.
            message = replace(message, deadline=math.inf)
        if not self._is_timed or self.ahead is not None:
            # It takes the host's time; the time of a head on the last stage is part of the step.
            self._link.send(message)
            return
        answer = self._drafted(message)
        if answer is not None:
            waited = self._draft_s(answer.proposals)
            self._host_clock.wait(waited)
            self._events.answered(answer.proposals, answer.report, DraftSeconds(propose_s=waited))

    def _drafted(self, message: DrafterMessage) -> Answer | None:
        """The real drafter's answer, in no simulated time; None if it failed."""
        self._passes_before = self._passes_so_far
        self._answer = None
        self._draft_clock.begin()
        with self._host_clock.stopped():
            self._link.send(message)
        self._draft_clock.end()
        return self._answer

    def unanswered(self) -> None:
        """See `DrafterLink`."""
        self._link.unanswered()

    def disconnect(self) -> None:
        """See `DrafterLink`."""
        self._events = None
        self._link.disconnect()

    async def close(self) -> None:
        """See `DrafterLink`."""
        await self._link.close()

    def ready(self) -> None:
        """See `LinkEvents`."""
        assert self._events is not None
        self._events.ready()

    def answered(
        self,
        proposals: Sequence[Proposal],
        report: DrafterReport | None = None,
        seconds: DraftSeconds | None = None,
    ) -> None:
        """See `LinkEvents`; held until the profile's drafter would answer."""
        assert self._events is not None
        if self._is_timed and self.ahead is None:
            self._answer = Answer(proposals, report, seconds)
        else:
            self._events.answered(proposals, report, seconds)

    def told(self, num_others: int, *, is_draining: bool) -> None:
        """See `LinkEvents`."""
        assert self._events is not None
        self._events.told(num_others, is_draining=is_draining)

    @property
    def _passes_so_far(self) -> int:
        """Passes of the drafter's models so far; 0 if it does not count them."""
        return 0 if self._passes is None else self._passes.num_passes

    def _draft_s(self, proposals: Sequence[Proposal]) -> float:
        """Seconds that the profile's drafter needs for the last draft."""
        counts = self._passes is not None
        num_passes = self._passes_so_far - self._passes_before if counts else None
        return self.times.seconds(proposals, num_passes)

    def failed(self, error: DrafterError) -> None:
        """See `LinkEvents`."""
        assert self._events is not None
        self._events.failed(error)
