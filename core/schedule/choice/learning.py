"""The compiled loops that learn what drafters bring requests; `core/schedule/choice/kernels.py`
explains the arrays.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Float64, Int32, Int64
from ...compiled import compiled
from ...tree.kernels import DRAFTER, NODE
from .kernels import (
    ALONE_GAIN,
    ALONE_NODES,
    BEST,
    GAIN,
    LEFT_OUT,
    MESSAGE,
    NODES,
    NUM_COLUMNS,
    ONLY_GAIN,
    ONLY_NODES,
    OPEN_TOKEN,
    PROBING,
    QUERY,
    TRIED,
    WEIGHT,
    means,
)
from .known import Known

# What one more step leaves of the weight of those before it: of the engine, a class and a request.
DECAYS = np.array([0.99, 0.98, 0.95])
# The same of what probes bring.
LIFT_DECAY = 0.99
# Hazard that what is known above a class or a request counts for; bounds of hazard ratios.
HAZARD_PRIOR = 0.5
LEAST_RATIO, MOST_RATIO = 0.02, 10.0


@compiled
def note(known: Known, rows: Int64, choices: Int64, credits: Float64, regime: int) -> None:
    """Learn what every drafter brought every request.

    rows     int64 [requests]  -1 for one that has ended
    credits  float64 [requests, drafters, 7]  as `credit_nodes` has them
    """
    for drafter in range(choices.shape[1]):
        for request in range(len(rows)):
            if rows[request] >= 0:
                path, choice = known.paths[rows[request]], choices[request, drafter]
                _note_one(known, path, drafter, choice, credits[request, drafter], regime)


@compiled
def charge_trials(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    known: Known,
    rows: Int64,
    choices: Int64,
    saved_s: Float64,
    rows_s: Float64,
    num_tokens: Float64,
    host_s: Float64,
    most_debt: float,
) -> None:
    """Charge the accounts for what was tried; before `note`, which opens requests.

    rows             int64 [requests]  -1 for one that has ended
    saved_s, rows_s  float64 [requests, drafters]  seconds that nodes of each saved, and took
    num_tokens       float64 [requests]  of their texts
    host_s           float64 [2]  as of `StepWishes`
    most_debt        seconds: one bad try does not end trying for long
    """
    is_asked = (choices != LEFT_OUT) & (choices < TRIED)
    if choices.any() and not is_asked.any():
        known.host[0] = max(known.host[0] - host_s[0], -most_debt)
    for drafter in range(choices.shape[1]):
        # Where none is asked because it pays, the first that is tried pays for them all.
        message_s = 0.0 if is_asked[:, drafter].any() else known.costs[drafter, MESSAGE]
        for request in range(len(rows)):
            if choices[request, drafter] < TRIED:
                continue
            taken = message_s + known.costs[drafter, QUERY] + rows_s[request, drafter]
            message_s = 0.0
            if not is_asked[request].any():
                taken += host_s[1]
                is_asked[request, drafter] = True
            if rows[request] >= 0 and not known.is_open[rows[request], drafter]:
                taken += known.costs[drafter, OPEN_TOKEN] * num_tokens[request]
            # What it brings pays for what it took, and no more.
            debt = known.balance[drafter, 0] - max(taken - saved_s[request, drafter], 0.0)
            known.balance[drafter, 0] = max(debt, -most_debt)


@compiled
def _note_one(  # noqa: PLR0917 - compiled functions take no options by name
    known: Known, path: Int64, drafter: int, choice: int, credit: Float64, regime: int
) -> None:
    if choice != LEFT_OUT:
        known.is_open[path[2], drafter] = True
    if choice % TRIED == PROBING:
        usual_gain = means(known.levels, path, regime)[drafter, GAIN]
        known.lift[drafter] *= LIFT_DECAY
        known.lift[drafter, 0] += 1.0
        known.lift[drafter, 1] += credit[GAIN] - usual_gain
        return
    if choice == BEST:
        # What would count for it beside cheaper ones is not seen without them.
        usual = means(known.levels, path, regime)[drafter]
        credit = credit.copy()
        credit[GAIN], credit[NODES] = usual[GAIN], usual[NODES]
    # A late proposal brings nodes to a step that did not ask for it.
    if choice == LEFT_OUT and not credit[ALONE_NODES]:
        return
    for depth in range(3):
        # A request of no class has the engine's row twice.
        if depth and path[depth] == path[depth - 1]:
            continue
        own = known.levels[path[depth], drafter, regime]
        if choice != LEFT_OUT:
            own *= DECAYS[depth]
            own[WEIGHT] += 1.0
        own += credit


@compiled
def credit_nodes(
    attributions: Int32, attribution_ends: Int64, rows: Int32, row_ends: Int64, costs: Float64
) -> Float64:
    """float64 [trees, drafters, 7]: nodes of each by the columns of `Known.levels`, of weight 0.

    Accepted nodes are the `rows` of a tree; row 0 is the root, node i is row i + 1. Of several
    drafters that proposed a node, it counts for the one of the cheapest query, `costs`
    [drafters, 3].
    """
    credits = np.zeros((len(row_ends), len(costs), NUM_COLUMNS))
    first, first_row = 0, 0
    for tree in range(len(row_ends)):
        said = attributions[first : attribution_ends[tree]]
        owners, counts = _owners(said, costs)
        is_accepted = np.zeros(len(owners), dtype=np.bool_)
        for index in range(first_row, row_ends[tree]):
            if rows[index]:
                is_accepted[rows[index] - 1] = True
        for node in range(len(owners)):
            credits[tree, owners[node], NODES] += 1
            credits[tree, owners[node], GAIN] += is_accepted[node]
            if counts[node] == 1:
                credits[tree, owners[node], ONLY_NODES] += 1
                credits[tree, owners[node], ONLY_GAIN] += is_accepted[node]
        for attribution in range(len(said)):
            node, drafter = said[attribution, NODE], said[attribution, DRAFTER]
            credits[tree, drafter, ALONE_NODES] += 1
            credits[tree, drafter, ALONE_GAIN] += is_accepted[node]
        first, first_row = attribution_ends[tree], row_ends[tree]
    return credits


@compiled
def _owners(attributions: Int32, costs: Float64) -> tuple[Int64, Int64]:
    """int64 [nodes] twice: the drafter that each node counts for, and how many said it."""
    size = 0
    for attribution in range(len(attributions)):
        size = max(size, attributions[attribution, NODE] + 1)
    owners, counts = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for attribution in range(len(attributions)):
        node, drafter = attributions[attribution, NODE], attributions[attribution, DRAFTER]
        counts[node] += 1
        if owners[node] < 0 or costs[drafter, QUERY] < costs[owners[node], QUERY]:
            owners[node] = drafter
    return owners, counts


@compiled
def ratios(known: Known, rows: Int64) -> Float64:
    """float64 [requests]: hazard ratios; 1 where nothing is known."""
    found = np.ones(len(rows))
    for index in range(len(rows)):
        if rows[index] >= 0:
            for depth in range(1, 3):
                own = known.failures[known.paths[rows[index], depth]]
                failed = own[0] + HAZARD_PRIOR * found[index]
                found[index] = failed / (own[1] + HAZARD_PRIOR)
    return np.minimum(np.maximum(found, LEAST_RATIO), MOST_RATIO)


@compiled
def calibrate(known: Known, rows: Int64, judged: Float64) -> None:
    """Learn how often the most probable nodes were wrong.

    judged  float64 [requests, 2]  failures, and the hazard that was gone through
    """
    for index in range(len(rows)):
        if rows[index] >= 0 and judged[index, 1] > 0:
            for depth in range(1, 3):
                own = known.failures[known.paths[rows[index], depth]]
                own *= DECAYS[depth]
                own += judged[index]
