"""A link to a drafter that would have a device of its own, which takes as long as a profile's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ...cluster.links.link import DrafterMessage, DraftSeconds
from ...cluster.links.pool import AnyLink
from ...core.arrays import Span
from .draft_times import DraftTimes
from .host_clock import HostClock
from .slowed_link import Answer, SlowedLink


class ApartLink(SlowedLink):
    """Drafts in this process and at once; the answer comes when the profile's drafter would have
    given it, and the engine goes on meanwhile. What is hurried is drafted again, of as many passes
    as the profile's drafter would have begun.

    spans  when it worked at drafts so far, seconds of the simulation
    """

    def __init__(
        self,
        link: AnyLink,
        times: DraftTimes,
        clock: HostClock,
        *,
        drafts_ahead: bool,
    ) -> None:
        assert times.are_known, "its time is the profile's"
        super().__init__(link, times, clock)
        self._drafts_ahead = drafts_ahead
        self._timer: asyncio.TimerHandle | None = None
        self._message: DrafterMessage | None = None
        self._sent_at = 0.0
        # Of the last answer, were it not hurried.
        self._num_passes, self._total_s = 0, 0.0
        self.spans: list[Span] = []

    @property
    def is_local(self) -> bool:
        """See `DrafterLink`."""
        return False

    @property
    def drafts_ahead(self) -> bool:
        """See `DrafterLink`."""
        return self._drafts_ahead

    def send(self, message: DrafterMessage) -> None:
        """See `DrafterLink`."""
        self._message, self._sent_at = message, self._host_clock()
        answer = self._drafted(message)
        if answer is not None:
            self._answer_later(answer)

    def hurry(self) -> None:
        """See `DrafterLink`."""
        assert self._timer is not None
        assert self._message is not None
        if not self._num_passes:
            return
        share = (self._host_clock() - self._sent_at) / self._total_s
        begun = 1 + int(share * self._num_passes)
        if begun < self._num_passes:
            self._timer.cancel()
            self.spans.pop()
            left = iter(range(begun))
            # It heard of the rest with the first time.
            again = replace(self._message, closes=(), opens=(), commits=(), last_commits=())
            answer = self._drafted(again, lambda: next(left, None) is None)
            if answer is not None:
                self._answer_later(answer)

    def disconnect(self) -> None:
        """See `DrafterLink`."""
        if self._timer is not None:
            self._timer.cancel()
        super().disconnect()

    def _answer_later(self, answer: Answer) -> None:
        """Pass the answer on when the profile's drafter, at work since `_sent_at`, has it."""
        assert self._events is not None
        self._num_passes = self._passes_so_far - self._passes_before
        self._total_s = self._draft_s(answer.proposals)
        ready_at = max(self._sent_at + self._total_s, self._host_clock())
        if answer.proposals:
            self.spans.append((self._sent_at, ready_at))
        seconds = DraftSeconds(propose_s=self._total_s)
        self._timer = asyncio.get_running_loop().call_at(
            ready_at, self._events.answered, answer.proposals, answer.report, seconds
        )
