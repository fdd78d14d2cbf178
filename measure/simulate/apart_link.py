"""A link to a drafter that would have a device of its own, which takes as long as a profile's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...cluster.links.link import DrafterMessage, DrafterReport, DraftSeconds
from ...cluster.links.pool import AnyLink
from ...core.arrays import Span
from ...core.proposals import Proposal
from .cost_profile import CostProfile
from .slowed_link import SlowedLink


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """When a drafter worked, wall-clock seconds; whether behind what the target may say."""

    span: Span
    is_ahead: bool


class ApartLink(SlowedLink):
    """Drafts in this process and at once; the answer comes when the profile's drafter would have
    given it, and the engine goes on meanwhile. What is hurried is drafted again, of as many passes
    as the profile's drafter would have begun.

    spans  of the drafts so far
    """

    def __init__(
        self, link: AnyLink, kind: str, profile: CostProfile, *, drafts_ahead: bool
    ) -> None:
        super().__init__(link, kind, profile)
        self._drafts_ahead = drafts_ahead
        self._answer: asyncio.TimerHandle | None = None
        self._message: DrafterMessage | None = None
        # Of the last answer, were it not hurried.
        self._num_passes, self._total_s = 0, 0.0
        self.spans: list[DraftSpan] = []

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
        self._message = message
        super().send(message)

    def hurry(self) -> None:
        """See `DrafterLink`."""
        assert self._answer is not None
        assert self._message is not None
        if not self._num_passes:
            return
        share = (time.perf_counter() - self._sent_at) / self._total_s
        begun = 1 + int(share * self._num_passes)
        if begun < self._num_passes:
            self._answer.cancel()
            self.spans.pop()
            self.num_drafts -= 1
            self._passes_before = self._passes_so_far
            left = iter(range(begun))
            # It heard of the rest with the first time.
            again = replace(self._message, closes=(), opens=(), commits=(), last_commits=())
            self._clock.begin()
            self._link.send(again, lambda: next(left, None) is None)

    def disconnect(self) -> None:
        """See `DrafterLink`."""
        if self._answer is not None:
            self._answer.cancel()
        super().disconnect()

    def answered(
        self,
        proposals: Sequence[Proposal],
        report: DrafterReport | None = None,
        seconds: DraftSeconds | None = None,
    ) -> None:
        """Pass the answer on when the profile's drafter has it."""
        assert self._events is not None
        assert self._message is not None
        self._clock.end()
        waited = max(self._left_to_wait(proposals), 0.0)
        took = time.perf_counter() - self._sent_at
        self._num_passes = self._passes_so_far - self._passes_before
        self._total_s = took + waited
        if proposals:
            now = time.time()
            self.spans.append(DraftSpan((now - took, now + waited), bool(self._message.ahead)))
        seconds = (seconds or DraftSeconds()) + DraftSeconds(propose_s=waited)
        loop = asyncio.get_running_loop()
        self._answer = loop.call_later(waited, self._events.answered, proposals, report, seconds)
