"""The first steps of an engine: every drafter is asked, so that what each brings beside the others
is known from the beginning.

To try them one by one would take their accounts far longer, and tell nothing of what two say
together. All of them together bring more than any, so that it costs little; one that will hardly
ever pay is not asked any longer.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Float64, Int64
from ...compiled import compiled
from ...reach import NUM_REACHES
from .deciding import beyond_others
from .kernels import ASKED, BEYOND, GAIN, LEFT_OUT, MESSAGE, QUERY, TRIED, WEIGHT, StepWishes
from .known import NUM_REGIMES, Known, cell_of

# Steps of each reach: of all drafters, and at most.
LEAST_STEPS, MOST_STEPS = 3.0, 64.0
# Tokens of a step that is added to those that were seen: runs that copy are rare and long.
HOPED_FOR = 3.0


@compiled
def introduce(choices: Int64, forced: Int64, known: Known, wishes: StepWishes) -> None:
    """Ask, for one of the step's requests, those that are hardly known after a step such as its
    last one; tell those that draft at the step's end after which outcomes of it they are.

    choices  int64 [requests, drafters]
    forced   int64, likewise  after which outcomes (bits of `core/reach.py`) each is to draft
    """
    place = wishes.turn % len(choices)
    reached = wishes.cells[place] % NUM_REACHES
    for drafter in range(choices.shape[1]):
        taken_s = known.costs[drafter, MESSAGE] + known.costs[drafter, QUERY]
        if not wishes.allowed[place, drafter] or taken_s > wishes.round_s:
            continue
        for reach in range(NUM_REACHES):
            if not _is_hardly_known(known, drafter, reach, taken_s, wishes.token_s):
                continue
            forced[place, drafter] |= 1 << reach
            is_due = reach == reached and not wishes.is_ahead[drafter]
            if is_due and choices[place, drafter] == LEFT_OUT:
                choices[place, drafter] = ASKED + TRIED


@compiled
def _is_hardly_known(
    known: Known, drafter: int, reach: int, taken_s: float, token_s: float
) -> bool:
    """Whether it may save the seconds that it takes, as far as few steps tell.

    Beyond all those that take less: a dearer one that says the same is what it may be asked instead
    of.
    """
    own = _sums(known, drafter, drafter, reach)
    if own[WEIGHT] < LEAST_STEPS or own[WEIGHT] >= MOST_STEPS:
        return bool(own[WEIGHT] < LEAST_STEPS)
    hoped_for = own[GAIN] + HOPED_FOR
    if hoped_for * token_s >= taken_s * (own[WEIGHT] + 1.0):
        hoped_for = own[WEIGHT] * _beyond_cheaper(known, drafter, reach, taken_s) + HOPED_FOR
    return bool(hoped_for * token_s >= taken_s * (own[WEIGHT] + 1.0))


@compiled
def _beyond_cheaper(known: Known, drafter: int, reach: int, taken_s: float) -> float:
    """Accepted nodes of a step that a drafter brings and none of those that take less."""
    count = len(known.costs)
    choices = np.full(count, LEFT_OUT)
    expected = np.zeros((count, 1 + count, 3))
    for one in range(count):
        own = _sums(known, one, one, reach)
        other_s = known.costs[one, MESSAGE] + known.costs[one, QUERY]
        if one != drafter and (other_s >= taken_s or own[WEIGHT] < LEAST_STEPS):
            continue
        choices[one] = ASKED
        for other in range(count):
            pair = _sums(known, one, other, reach)
            expected[one, BEYOND + other] = pair if pair[WEIGHT] >= LEAST_STEPS else own
            expected[one, BEYOND + other] /= max(expected[one, BEYOND + other, WEIGHT], 1.0)
    return beyond_others(expected, drafter, choices)[0]


@compiled
def _sums(known: Known, drafter: int, other: int, reach: int) -> Float64:
    """float64 [3]: of the engine's steps of a reach, at any price of rows, as in `Known.levels`."""
    sums = np.zeros(3)
    for regime in range(NUM_REGIMES):
        sums += known.levels[0, drafter, BEYOND + other, cell_of(regime, reach)]
    return sums
