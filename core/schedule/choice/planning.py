"""The plan of a step, in one call of compiled code.

Its parts are small, and would each cost more to call than to run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays import Float64, Int64
from ...compiled import compiled
from ...reach import EVERY_REACH
from .deciding import decide
from .draft_orders import exchange, expected_counts, paying_reaches
from .introductions import introduce
from .kernels import ASKED, LEFT_OUT, TRIED, StepWishes, interests
from .known import Known


class StepPlan(NamedTuple):
    """Who is asked in a step.

    choices    int64 [requests, drafters]
    told       int64, likewise  after which outcomes (bits of `core/reach.py`) those that draft at
               the step's end are told to
    counts     float64 [drafters]  for how many requests these will, as outcomes were of late
    interests  float64 [drafters]  `kernels.interests`
    row_s      seconds of a row at the margin
    """

    choices: Int64
    told: Int64
    counts: Float64
    interests: Float64
    row_s: float


@compiled
def plan_step(known: Known, wishes: StepWishes) -> StepPlan:
    """Decide who is asked because it pays, tried, looked at first, introduced, and told ahead."""
    choices, row_s = decide(known, wishes)
    found = interests(known, wishes)
    paying = paying_reaches(choices, known, wishes)
    forced = _look_at_new(choices, wishes)
    if len(choices):
        introduce(choices, forced, known, wishes)
    told = exchange(choices, forced, paying, known, wishes)
    return StepPlan(choices, told, expected_counts(told, known), found, row_s)


@compiled
def _look_at_new(choices: Int64, wishes: StepWishes) -> Int64:
    """Ask those that are new; int64 [requests, drafters]: who drafts after every outcome whatever
    it brings, for it is new or tried."""
    forced = np.zeros_like(choices)
    for request in range(len(choices)):
        for drafter in range(choices.shape[1]):
            is_new = wishes.is_new[drafter] and wishes.allowed[request, drafter]
            if is_new and choices[request, drafter] == LEFT_OUT:
                choices[request, drafter] = ASKED
            if is_new or choices[request, drafter] >= TRIED:
                forced[request, drafter] = EVERY_REACH
    return forced
