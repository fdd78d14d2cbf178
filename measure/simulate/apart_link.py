"""A link to a drafter that would have a device of its own, which takes as long as a profile's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

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
    given it, and the engine goes on meanwhile.

    spans  of the drafts so far
    """

    def __init__(
        self, link: AnyLink, kind: str, profile: CostProfile, *, drafts_ahead: bool
    ) -> None:
        super().__init__(link, kind, profile)
        self._drafts_ahead = drafts_ahead
        self._answer: asyncio.TimerHandle | None = None
        self._is_ahead = False
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
        self._is_ahead = any(query.assumed is not None for query in message.queries)
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
        seconds: DraftSeconds | None = None,
    ) -> None:
        """Pass the answer on when the profile's drafter has it."""
        assert self._events is not None
        waited = max(self._left_to_wait(proposals), 0.0)
        if proposals:
            took = time.perf_counter() - self._sent_at
            now = time.time()
            self.spans.append(DraftSpan((now - took, now + waited), self._is_ahead))
        seconds = (seconds or DraftSeconds()) + DraftSeconds(propose_s=waited)
        loop = asyncio.get_running_loop()
        self._answer = loop.call_later(waited, self._events.answered, proposals, report, seconds)
