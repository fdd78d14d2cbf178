"""Who is asked for drafts in a step, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..arrays import Float64, Int64
from ..proposals import DraftCost, Proposal


@dataclass(frozen=True, slots=True, eq=False)
class AskPlan:
    """Who is asked for what in a step.

    by_drafter  ids of the requests that each drafter is asked for; none that is asked for nothing
    probing     of these, the ones whose probes go into the step
    ahead       of drafters that draft at the end of this step for the next one: after which
                outcomes of it they do, bits of `core/reach.py`, by the requests' ids; in
                `by_drafter` they are asked for what they were told to draft in the step before
    ids         of the requests that take drafts; the rest is about them, for what is learned of it:
    choices     int64 [requests, drafters]  what was decided (`core/schedule/choice/kernels.py`)
    sizes       float64 [requests, 3]  as of `StepWishes` of the choice's kernels
    row_s       seconds that a row takes at the margin
    token_s     seconds that an accepted token saves
    cells       int64 [requests]  what is known of which (`core/schedule/choice/known.py`)
    ahead_counts  for how many requests each of these is expected to draft; all, if not here
    step_s      seconds of a step of one token for each; 0 where nobody asks what it takes
    trials      likewise, those that are not known to pay
    level_tokens  of those in `ahead`: what a further level of their drafts takes, in tokens that
                would save as much
    """

    by_drafter: Mapping[str, tuple[str, ...]]
    probing: Mapping[str, frozenset[str]]
    ids: tuple[str, ...] = ()
    choices: Int64 = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    sizes: Float64 = field(default_factory=lambda: np.empty((0, 3)))
    row_s: float = 0.0
    token_s: float = 0.0
    cells: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ahead: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ahead_counts: Mapping[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    trials: Mapping[str, frozenset[str]] = field(default_factory=dict)
    level_tokens: Mapping[str, float] = field(default_factory=dict)

    def lasting(self, request_id: str) -> tuple[str, ...]:
        """Drafters that are asked for a request because they pay."""
        return tuple(
            name
            for name, ids in self.by_drafter.items()
            if request_id in ids and request_id not in self.trials.get(name, ())
        )

    def beside(self, more: Mapping[str, Sequence[str]]) -> AskPlan:
        """This one, whose drafters are also asked for requests that nothing was decided about."""
        if not more:
            return self
        names = dict.fromkeys((*self.by_drafter, *more))
        by_drafter = {name: (*self.by_drafter.get(name, ()), *more.get(name, ())) for name in names}
        return replace(self, by_drafter=by_drafter)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """What drafters proposed, by request id.

    began_at  when the planning of the step began, seconds of the engine's clock
    seconds   how long they were waited for
    plan      who was asked for what
    costs     of each drafter, by name
    spared    who was not asked in the end, whatever the plan says
    """

    by_request: Mapping[str, Sequence[Proposal]]
    began_at: float
    seconds: float
    plan: AskPlan
    costs: Mapping[str, DraftCost]
    spared: frozenset[str] = frozenset()

    def plan_heard(self, names: Sequence[str]) -> AskPlan:
        """The plan as it was kept to, for what is learned of it.

        names: of the drafters, by id
        """
        choices = self.plan.choices
        # Drafters may have joined since.
        known = names[: choices.shape[1]]
        spared = [place for place, name in enumerate(known) if name in self.spared]
        if not spared:
            return self.plan
        choices = choices.copy()
        choices[:, spared] = 0  # `LEFT_OUT` of the choice's kernels
        return replace(self.plan, choices=choices)

    @property
    def ahead_s(self) -> float:
        """Seconds that the step will last longer for what is drafted at its end."""
        # One of them may have been left out since the plan.
        ahead = [
            (self.costs.get(name), self.plan.ahead_counts.get(name, len(ids)))
            for name, ids in self.plan.ahead.items()
        ]
        return sum(
            min(count, 1.0) * cost.message_s + count * cost.query_s
            for cost, count in ahead
            if cost is not None
        )


def nobody_asked(began_at: float) -> DraftBatch:
    """The batch of a step that was planned then, and asked nobody."""
    return DraftBatch({}, began_at, 0.0, AskPlan({}, {}), {})
