"""A link to a drafter of this process that takes as long as that of a profile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

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
from .cost_profile import CostProfile
from .draft_clock import DraftClock
from .draft_times import draft_seconds


class SlowedLink:
    """Answers like the link that it stands before, when the profile's drafter would have.

    kind        of the drafter, as the profile names it
    num_drafts  answers to queries
    num_late    of these, that took longer than the profile's
    """

    def __init__(self, link: AnyLink, kind: str, profile: CostProfile) -> None:
        assert isinstance(link, InprocLink), "an engine over a profile has its drafters in process"
        self._link = link
        self.kind = kind
        self._profile = profile
        self._clock = DraftClock(self._pass_s, lambda: self._passes_so_far)
        if link.passes is not None and kind in profile.drafters:
            link.passes.clock = self._clock
        self._events: LinkEvents | None = None
        self._sent_at = 0.0
        self._passes_before = 0
        self.num_drafts = self.num_late = 0

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

    @property
    def drafts_ahead(self) -> bool:
        """See `DrafterLink`."""
        return self._link.drafts_ahead

    def connect(self, events: LinkEvents) -> None:
        """See `DrafterLink`."""
        self._events = events
        self._link.connect(self)

    def send(self, message: DrafterMessage) -> None:
        """See `DrafterLink`."""
        self._sent_at = time.perf_counter()
        self._passes_before = self._passes_so_far
        self._clock.begin()
        self._link.send(message)

    def hurry(self) -> None:
        """See `DrafterLink`."""
        self._link.hurry()

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
        """Wait for the profile's drafter, then pass the answer on."""
        assert self._events is not None
        self._clock.end()
        if self.ahead is not None:
            # It was drafted in a step, and took its time there.
            self._events.answered(proposals, report, seconds)
            return
        waited = self._left_to_wait(proposals)
        if waited > 0:
            time.sleep(waited)
            seconds = (seconds or DraftSeconds()) + DraftSeconds(propose_s=waited)
        self._events.answered(proposals, report, seconds)

    def told(self, num_others: int, *, is_draining: bool) -> None:
        """See `LinkEvents`."""
        assert self._events is not None
        self._events.told(num_others, is_draining=is_draining)

    @property
    def _passes_so_far(self) -> int:
        """Of the drafter's models so far; 0 of one that does not count any."""
        return 0 if self._link.passes is None else self._link.passes.num_passes

    @property
    def _pass_s(self) -> float:
        """Seconds here of a pass of the profile's drafter; 0 where it has none of its kind."""
        if self.kind not in self._profile.drafters:
            return 0.0
        return self._profile.slowdown * self._profile.draft_s(self.kind, 1, 1)

    def _left_to_wait(self, proposals: Sequence[Proposal]) -> float:
        """Seconds that the profile's drafter would still work, now that the real one is done."""
        took = time.perf_counter() - self._sent_at
        counts = self._link.passes is not None
        num_passes = self._passes_so_far - self._passes_before if counts else None
        left = draft_seconds(self._profile, self.kind, proposals, took, num_passes) - took
        self.num_drafts += bool(proposals)
        self.num_late += bool(proposals) and left < 0
        return left

    def failed(self, error: DrafterError) -> None:
        """See `LinkEvents`."""
        assert self._events is not None
        self._clock.end()
        self._events.failed(error)
