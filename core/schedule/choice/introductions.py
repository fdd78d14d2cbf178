"""The first steps of an engine: every drafter is asked, so that what each brings beside the others
is known from the beginning.

To try them one by one would take their accounts far longer, and tell nothing of what two say
together. All of them together bring more than any, so that it costs little; one that will hardly
ever pay is not asked any longer.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Int64
from ...compiled import compiled
from ...reach import NUM_REACHES
from .kernels import ASKED, BEYOND, GAIN, LEFT_OUT, MESSAGE, QUERY, TRIED, WEIGHT, StepWishes
from .known import NUM_REGIMES, Known, cell_of
from .taking import beyond_others

# Steps of each reach: of all drafters, and at most.
LEAST_STEPS, MOST_STEPS = 3.0, 64.0
# Tokens of a step that is added to those that were seen: runs that copy are rare and long, and one
# that was unlucky at first is hardly ever asked again.
HOPED_FOR = 12.0


@compiled
def introduce(choices: Int64, forced: Int64, known: Known, wishes: StepWishes) -> None:
    """Ask, for one of the step's requests, those that are hardly known after a step such as its
    last one; tell those that draft at the step's end after which outcomes of it they are.

    choices  int64 [requests, drafters]
    forced   int64, likewise  after which outcomes (bits of `core/reach.py`) each of these is to
             draft
    """
    place = wishes.turn % len(choices)
    reached = wishes.cells[place] % NUM_REACHES
    for drafter in range(choices.shape[1]):
        taken_s = known.costs[drafter, MESSAGE] + known.costs[drafter, QUERY]
        if not wishes.allowed[place, drafter] or taken_s > wishes.round_s:
            continue
        if not wishes.is_ahead[drafter]:
            is_due = choices[place, drafter] == LEFT_OUT
            if is_due and _is_hardly_known(known, drafter, reached, taken_s, wishes.token_s):
                choices[place, drafter] = ASKED + TRIED
            continue
        for reach in range(NUM_REACHES):
            if _is_hardly_known(known, drafter, reach, taken_s, wishes.token_s):
                forced[place, drafter] |= 1 << reach


@compiled
def _is_hardly_known(
    known: Known, drafter: int, reach: int, taken_s: float, token_s: float
) -> bool:
    """Whether it may save the seconds that it takes, as far as few steps tell.

    Beyond all those that take less: a dearer one that says the same is what it may be asked instead
    of.
    """
    num_steps = _sum(known, drafter, drafter, reach, WEIGHT)
    if num_steps < LEAST_STEPS or num_steps >= MOST_STEPS:
        return bool(num_steps < LEAST_STEPS)
    least = (num_steps + 1.0) * taken_s
    if (_sum(known, drafter, drafter, reach, GAIN) + HOPED_FOR) * token_s < least:
        return False
    gain = num_steps * _beyond_cheaper(known, drafter, reach, taken_s)
    return bool((gain + HOPED_FOR) * token_s >= least)


@compiled
def _beyond_cheaper(known: Known, drafter: int, reach: int, taken_s: float) -> float:
    """Accepted nodes of a step that a drafter brings and none of those that take less."""
    count = len(known.costs)
    choices = np.full(count, LEFT_OUT)
    for one in range(count):
        is_known = _sum(known, one, one, reach, WEIGHT) >= LEAST_STEPS
        other_s = known.costs[one, MESSAGE] + known.costs[one, QUERY]
        if one == drafter or (is_known and other_s < taken_s):
            choices[one] = ASKED
    expected = np.zeros((count, 1 + count, 3))
    for one in range(count):
        for other in range(count):
            if choices[one] == LEFT_OUT or choices[other] == LEFT_OUT:
                continue
            # All that one brings counts beyond another that was never asked with it.
            pair = other if _sum(known, one, other, reach, WEIGHT) >= LEAST_STEPS else one
            num_steps = _sum(known, one, pair, reach, WEIGHT)
            expected[one, BEYOND + other, GAIN] = _sum(known, one, pair, reach, GAIN) / num_steps
    return beyond_others(expected, drafter, choices)[0]


@compiled
def _sum(known: Known, drafter: int, other: int, reach: int, part: int) -> float:
    """Of the engine's steps of a reach, at any price of rows, as in `Known.levels`."""
    total = 0.0
    for regime in range(NUM_REGIMES):
        total += known.levels[0, drafter, BEYOND + other, cell_of(regime, reach), part]
    return total
