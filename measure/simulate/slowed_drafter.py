"""A drafter of this process that takes as long as that of a cost profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ...cluster.config import HEAD, DrafterConfig
from ...cluster.drafting.options import head_folder
from ...core.arrays import ROOT
from ...core.interfaces import (
    CachingDrafter,
    Drafter,
    FeatureDrafter,
    LearningDrafter,
    OwningDrafter,
    PrefixCounts,
)
from ...core.proposals import Commit, DraftRequest, FeatureLayers, FeatureRows, Proposal, Query
from ...models.heads.load_head import read_head_checkpoint
from .cost_profile import SMALL_MODEL, CostProfile
from .host_clock import HostClock


@runtime_checkable
class PassCounter(Protocol):
    """A drafter that counts its models' passes and times them by a clock, in seconds. The clock can
    be replaced to simulate other times."""

    clock: Callable[[], float]

    @property
    def num_passes(self) -> int: ...  # noqa: D102 - see the class


class DraftClock:
    """The simulation's time; during a draft, its start plus the time of its passes so far.

    So stopping rules, tree shapes and deadlines follow the profile's times.
    """

    def __init__(
        self, clock: Callable[[], float], pass_s: float, num_passes: Callable[[], int]
    ) -> None:
        """`clock`: of the simulation; `pass_s`: of a pass; `num_passes`: of the drafter so far."""
        self._clock = clock
        self._pass_s = pass_s
        self._num_passes = num_passes
        self._passes_before: int | None = None

    def begin(self) -> None:
        """Start a draft; the simulation's time is paused."""
        self._passes_before = self._num_passes()

    def end(self) -> None:
        """End the draft; the simulation then waits for its time."""
        self._passes_before = None

    def __call__(self) -> float:
        """Seconds."""
        if self._passes_before is None:
            return self._clock()
        return self._clock() + (self._num_passes() - self._passes_before) * self._pass_s


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """The times of one drafter in a profile. `kind`: its name in the profile."""

    profile: CostProfile
    kind: str

    @property
    def are_known(self) -> bool:
        """Whether the profile has its kind; otherwise its real time is used."""
        return self.kind in self.profile.drafters

    @property
    def pass_s(self) -> float:
        """Seconds of a pass of one row; 0 if unknown."""
        return self._draft_s(1, 1) if self.are_known else 0.0

    def seconds(self, proposals: Sequence[Proposal], num_passes: int | None = None) -> float:
        """Seconds of a draft with known times: all requests' trees together, a pass a level.

        num_passes  passes of the real draft, if it counts them; they include passes over new text,
                    and draws that give fewer tokens
        """
        if not proposals:
            return 0.0
        levels = [_level_sizes(proposal) for proposal in proposals]
        depth = max(map(len, levels), default=0) if num_passes is None else num_passes
        # The next pass reads a level.
        widest = sum(max(sizes, default=0) for sizes in levels)
        return self._draft_s(depth, widest)

    def _draft_s(self, depth: int, num_rows: int) -> float:
        return self.profile.draft_s(self.kind, depth, num_rows)


def times_of(
    drafter: DrafterConfig, profile: CostProfile, small_model: str = SMALL_MODEL
) -> DraftTimes:
    """The times of a drafter in a profile.

    small_model  the profile's entry for small models
    Raises `CheckpointError` or `ConfigError` for a head that cannot be read.
    """
    if drafter.kind == HEAD:
        return DraftTimes(profile, read_head_checkpoint(head_folder(drafter)).kind)
    is_model = drafter.kind == SMALL_MODEL
    return DraftTimes(profile, small_model if is_model else drafter.kind)


def _level_sizes(proposal: Proposal) -> list[int]:
    """Nodes of each level of a tree."""
    depths: list[int] = []
    sizes: list[int] = []
    for parent in proposal.parents.tolist():
        depth = 0 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        if depth == len(sizes):
            sizes.append(0)
        sizes[depth] += 1
    return sizes


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
    """A drafter that takes as long as the profile's; see `SlowedDrafter`."""
    kind = SlowedHead if isinstance(drafter, FeatureDrafter) else SlowedDrafter
    return kind(drafter, times, clock, wait)
