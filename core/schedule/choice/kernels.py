"""What a step wants to know of drafters, and what each is expected to bring it.

`drafter_choice.py` explains the estimates, `deciding.py` chooses by them, `learning.py` has the
loops that learn them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays import Bool, Float64, Int64
from ...compiled import compiled
from ...reach import NUM_REACHES
from .known import NUM_REGIMES, REGIMES, Known, cell_of

# Steps that the means of the engine, a class and a request count for before they have seen any.
PRIORS = np.array([1.0, 2.0, 8.0])
# What one more step leaves of the weight of those before it: of the engine, a class and a request.
DECAYS = np.array([0.998, 0.995, 0.97])
# Trials of what brings too little for what it takes are fewer, down to this part of them.
LEAST_INTEREST = 0.25

# Of steps that asked a drafter: their number, and its nodes that were accepted and bought.
WEIGHT, GAIN, NODES = range(3)
# Places of what it brings: beyond all others that were asked with it, and from BEYOND on beyond
# each drafter; in its own place stand all its nodes.
BEYOND_ALL, BEYOND = 0, 1
MESSAGE, QUERY, OPEN_TOKEN = range(3)
LEFT_OUT, ASKED, PROBING = range(3)
# Added to a choice that is a trial.
TRIED = 3


class StepWishes(NamedTuple):
    """The requests of a step, and what time is worth in it.

    rows       int64 [requests]  in `Known`
    allowed    bool [requests, drafters]  whom each takes
    sizes      float64 [requests, 3]  tokens of the text, steps that an opening may be paid in, and
               drafts at the ends of steps for each that is of use
    grid       float64 [n]  numbers of rows, rising
    curve_s    float64 [n]  seconds of the round with so many
    base_rows  of the step without any nodes
    token_s    seconds that an accepted token saves, of late
    plain_s    seconds of a token in plain decoding
    cells      int64 [requests]  `cell_of` the step's prices and the request's reach
    most_s     that an account holds: what would take longer is tried when it is full
    host_s     float64 [2]  that the host works for a step with drafts, and for each request with
               drafts, whoever is asked
    single_s   that a step takes longer than plain decoding if it has any nodes or probes at all
    round_s    of plain decoding for a token of each
    is_new     bool [drafters]  whose first drafts are looked at
    is_ahead   bool [drafters]  who drafts at the end of a step for the next one
    is_undrafted  bool [requests]  for which nobody drafted at the end of the last step
    turn       of the plan
    """

    rows: Int64
    allowed: Bool
    sizes: Float64
    grid: Float64
    curve_s: Float64
    base_rows: float
    token_s: float
    plain_s: float
    cells: Int64
    most_s: float
    host_s: Float64
    single_s: float
    round_s: float
    is_new: Bool
    is_ahead: Bool
    is_undrafted: Bool
    turn: int


def regime_of(row_s: float, token_s: float) -> int:
    """The range of the price of a row in tokens of plain decoding.

    What is bought depends on it, so what drafters bring is learned for each range by itself.
    """
    return sum(row_s >= bound * token_s for bound in REGIMES)


@compiled
def means(levels: Float64, path: Int64, cell: int) -> Float64:
    """float64 [drafters, 1 + drafters, 3]: what is expected of each at the end of a path of levels.

    As in `Known.levels`, but of one step; of the weights 0. What the engine expects is drawn to
    what it knows from the nearest other range of prices. Of two drafters that were never asked
    together, all that one says counts beyond the other.
    """
    return means_of_request(class_means(levels, path, cell), levels, path[2], cell)


@compiled
def class_means(levels: Float64, path: Int64, cell: int) -> Float64:
    """Likewise, of a new request of the class."""
    count = levels.shape[1]
    expected = np.zeros((count, 1 + count, 3))
    for drafter in range(count):
        own = BEYOND + drafter
        nearest = _nearest_known(levels[path[0], drafter, own], cell)
        for place in range(BEYOND - 1, BEYOND + count):
            # Its own nodes come first: they stand above the others.
            other = own if place < BEYOND else place
            for part in (GAIN, NODES):
                mean = 0.0 if place < BEYOND else expected[drafter, own, part]
                known = levels[path[0], drafter, other, nearest]
                mean = _drawn(known, part, mean, PRIORS[0])
                for depth in range(2):
                    level = levels[path[depth], drafter, other, cell]
                    mean = _drawn(level, part, mean, PRIORS[depth])
                expected[drafter, other, part] = mean
    return expected


@compiled
def means_of_request(above: Float64, levels: Float64, row: int, cell: int) -> Float64:
    """Likewise, of a request, of whose class `above` is expected."""
    expected = np.zeros(above.shape)
    for drafter in range(above.shape[0]):
        for other in range(BEYOND, above.shape[1]):
            own = levels[row, drafter, other, cell]
            # Nothing of others is left where as much is known of it as can be.
            prior = PRIORS[2] * max(1.0 - own[WEIGHT] * (1.0 - DECAYS[2]), 0.0)
            for part in (GAIN, NODES):
                expected[drafter, other, part] = _drawn(
                    own, part, above[drafter, other, part], prior
                )
    return expected


@compiled
def _drawn(sums: Float64, part: int, above: float, prior: float) -> float:
    return float((sums[part] + prior * above) / (sums[WEIGHT] + prior))


@compiled
def _nearest_known(engine: Float64, cell: int) -> int:
    """Another cell that has steps: of the same reach, and of two prices as near the one of dearer
    rows, where less is bought; else of any reach. Where there is none, one without steps.
    """
    regime, reach = cell // NUM_REACHES, cell % NUM_REACHES
    for turn in range(NUM_REACHES):
        other_reach = (reach + turn) % NUM_REACHES
        for distance in range(NUM_REGIMES):
            for other in (regime + distance, regime - distance):
                found = cell_of(other, other_reach)
                if 0 <= other < NUM_REGIMES and found != cell and engine[found, WEIGHT] > 0:
                    return found
    return cell_of(0 if regime else NUM_REGIMES - 1, reach)


@compiled
def interests(known: Known, wishes: StepWishes) -> Float64:
    """float64 [drafters]: what each may bring at best over what it takes, between `LEAST_INTEREST`
    and 1: so much of its account's income it gets.

    What is hardly known may bring anything: a step more is added to what it brought, of one token.
    Of the requests' reaches the one that it brings most after counts.
    """
    num_drafters = known.levels.shape[1]
    best = np.zeros(num_drafters)
    for cell in np.unique(wishes.cells):
        every = means(known.levels, np.zeros(3, dtype=np.int64), cell)
        for drafter in range(num_drafters):
            best[drafter] = max(best[drafter], every[drafter, BEYOND + drafter, GAIN])
    num_requests = max(len(wishes.rows), 1)
    found = np.ones(num_drafters)
    for drafter in range(num_drafters):
        weight = known.levels[0, drafter, BEYOND + drafter, :, WEIGHT].sum()
        gain = (weight * best[drafter] + 1.0) / (weight + 1.0)
        together_s = known.costs[drafter, MESSAGE] + wishes.host_s[0]
        taken_s = together_s / num_requests + known.costs[drafter, QUERY] + wishes.host_s[1]
        if taken_s > 0:
            found[drafter] = min(max(gain * wishes.plain_s / taken_s, LEAST_INTEREST), 1.0)
    return found
