"""What drafters that draft at the end of a step are told to draft, until the next step takes it.

The decision about them is made a step before the drafts are there, and so for each outcome that the
step may have: they draft only after those for which they pay. So that what they brought is learned
of the decision that it came of, it is kept until then.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Float64, Int64
from ...compiled import compiled
from ...reach import NUM_REACHES
from .deciding import will_ask
from .kernels import ASKED, LEFT_OUT, TRIED, StepWishes
from .known import Known

# What a request leaves of the weight of those before it, in counts of reaches.
REACH_DECAY = 0.99


@compiled
def paying_reaches(choices: Int64, known: Known, wishes: StepWishes) -> Int64:
    """int64 [requests, drafters]: after which outcomes of the step each of those that draft at its
    end will pay, bits of `core/reach.py`.

    choices  int64, likewise  of `decide`: who pays after an outcome such as the last step's
    """
    paying = np.zeros_like(choices)
    if not (wishes.allowed & wishes.is_ahead).any():
        return paying
    reached = wishes.cells % NUM_REACHES
    for turn in range(NUM_REACHES):
        reaches = (reached + turn) % NUM_REACHES
        asked = will_ask(known, wishes, wishes.cells - reached + reaches) if turn else choices
        for request in range(len(asked)):
            for drafter in np.flatnonzero(wishes.is_ahead):
                choice = asked[request, drafter]
                pays = choice != LEFT_OUT and choice < TRIED
                paying[request, drafter] |= pays << reaches[request]
    return paying


@compiled
def exchange(
    choices: Int64, forced: Int64, paying: Int64, known: Known, wishes: StepWishes
) -> Int64:
    """Keep what drafters are told for the next step, and take what they were told a step before.

    In `choices` stands then, of those that draft at a step's end, what they drafted for this step:
    what they were told to for outcomes such as the step before had. Gives int64 [requests,
    drafters]: after which outcomes each is told to draft.
    """
    told = np.zeros_like(paying)
    known.outcomes[:] *= REACH_DECAY ** len(choices)
    for request in range(len(choices)):
        row, reached = wishes.rows[request], wishes.cells[request] % NUM_REACHES
        known.outcomes[reached] += 1.0
        told[request] = (paying[request] | forced[request]) * wishes.is_ahead
        for drafter in np.flatnonzero(wishes.is_ahead):
            ordered, after = known.ordered[row, drafter], known.ordered_after[row, drafter]
            now = choices[request, drafter]
            if now == LEFT_OUT:
                now = ASKED if paying[request, drafter] else ASKED + TRIED
            known.ordered[row, drafter] = now
            known.ordered_after[row, drafter] = told[request, drafter]
            is_there = (after >> reached & 1) * (not wishes.is_undrafted[request])
            choices[request, drafter] = ordered * is_there
    return told


@compiled
def expected_counts(told: Int64, known: Known) -> Float64:
    """float64 [drafters]: for how many requests each will draft, as outcomes were of late."""
    shares = known.outcomes / known.outcomes.sum()
    counts = np.zeros(told.shape[1])
    for drafter in range(told.shape[1]):
        for reach in range(NUM_REACHES):
            counts[drafter] += shares[reach] * (told[:, drafter] >> reach & 1).sum()
    return counts
