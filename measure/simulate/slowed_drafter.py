"""A drafter of this process that takes as long as that of a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from ...core.interfaces import (
    AheadDrafter,
    CachingDrafter,
    Drafter,
    FeatureDrafter,
    LearningDrafter,
    OwningDrafter,
    PrefixCounts,
)
from ...core.proposals import Commit, DraftRequest, FeatureLayers, FeatureRows, Proposal, Query
from .draft_clock import DraftClock, PassCounter
from .draft_times import DraftTimes
from .host_clock import HostClock


class SlowedDrafter:
    """Drafts like the drafter that it stands before, while the clock stands still, and then waits
    as long as the profile's drafter would have taken. One that the profile does not have takes the
    host's time.

    wait  waits so many seconds; by default as the engine does, by the clock
    """

    def __init__(
        self,
        drafter: Drafter,
        times: DraftTimes,
        clock: HostClock,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        self.times = times
        self._drafter = drafter
        self._host_clock = clock
        self._wait = wait or clock.wait
        self._passes = drafter if isinstance(drafter, PassCounter) else None
        self._draft_clock = DraftClock(clock, times.pass_s, lambda: self._passes_so_far)
        self._keeps_time = self._passes is not None and times.are_known
        if self._passes is not None and self._keeps_time:
            self._passes.clock = self._draft_clock
        # Until the last draft: passes that read text since are of the next one.
        self._passes_before = self._passes_so_far

    @property
    def name(self) -> str:
        """See `Drafter`."""
        return self._drafter.name

    @property
    def memory_bytes(self) -> int:
        """See `Drafter`."""
        return self._drafter.memory_bytes

    @property
    def learning_counts(self) -> Mapping[str, int]:
        """See `LearningDrafter`."""
        drafter = self._drafter
        return drafter.learning_counts if isinstance(drafter, LearningDrafter) else {}

    @property
    def prefix_counts(self) -> PrefixCounts:
        """See `CachingDrafter`."""
        drafter = self._drafter
        return drafter.prefix_counts if isinstance(drafter, CachingDrafter) else PrefixCounts()

    def open(self, request: DraftRequest) -> None:
        """See `Drafter`."""
        with self._in_no_time():
            self._drafter.open(request)

    def observe(self, commits: Sequence[Commit]) -> None:
        """See `Drafter`."""
        with self._in_no_time():
            self._drafter.observe(commits)

    def propose(
        self, queries: Sequence[Query], deadline: float | None = None
    ) -> Sequence[Proposal]:
        """See `Drafter`."""
        if not self._keeps_time:
            # It reads another clock than the deadline is of.
            deadline = math.inf
        if not self.times.are_known:
            return self._drafter.propose(queries, deadline)
        self._draft_clock.begin()
        try:
            with self._host_clock.stopped():
                proposals = self._drafter.propose(queries, deadline)
        finally:
            self._draft_clock.end()
        num_passes = None if self._passes is None else self._passes_so_far - self._passes_before
        self._passes_before = self._passes_so_far
        self._wait(self.times.seconds(proposals, num_passes))
        return proposals

    def close(self, request_id: str) -> None:
        """See `Drafter`."""
        with self._in_no_time():
            self._drafter.close(request_id)

    def free(self) -> None:
        """See `OwningDrafter`."""
        if isinstance(self._drafter, OwningDrafter):
            self._drafter.free()

    def _in_no_time(self) -> AbstractContextManager[None]:
        """What is done in it takes no time, if the profile has the drafter."""
        return self._host_clock.stopped() if self.times.are_known else nullcontext()

    @property
    def _passes_so_far(self) -> int:
        """Of the drafter's models so far; 0 of one that does not count any."""
        return 0 if self._passes is None else self._passes.num_passes


class SlowedHead(SlowedDrafter):
    """The same for a drafter that goes on from the target's hidden states."""

    def __init__(
        self,
        drafter: Drafter,
        times: DraftTimes,
        clock: HostClock,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        assert isinstance(drafter, FeatureDrafter)
        super().__init__(drafter, times, clock, wait)
        self._head: FeatureDrafter = drafter
        self.feature_layers: FeatureLayers = drafter.feature_layers

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        """See `FeatureDrafter`."""
        with self._in_no_time():
            self._head.observe_features(rows)


def slowed(
    drafter: Drafter,
    times: DraftTimes,
    clock: HostClock,
    wait: Callable[[float], None] | None = None,
) -> Drafter:
    """A drafter that takes as long as the profile's; see `SlowedDrafter`.

    A head of the last stage stays as it is: it took its time in the step.
    """
    if isinstance(drafter, AheadDrafter):
        return drafter
    kind = SlowedHead if isinstance(drafter, FeatureDrafter) else SlowedDrafter
    return kind(drafter, times, clock, wait)
