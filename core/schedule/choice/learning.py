"""The compiled loops that learn what drafters bring requests; `core/schedule/choice/kernels.py`
explains the arrays.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Float64, Int32, Int64
from ...compiled import compiled
from ...tree.kernels import DRAFTER, NODE
from .kernels import (
    GAIN,
    LEFT_OUT,
    MESSAGE,
    NODES,
    OPEN_TOKEN,
    PROBING,
    QUERY,
    TRIED,
    WEIGHT,
    Known,
    means,
)

# What one more step leaves of the weight of those before it: of the engine, a class and a request.
DECAYS = np.array([0.99, 0.98, 0.95])
# The same of what probes bring.
LIFT_DECAY = 0.99
# Hazard that what is known above a class or a request counts for; bounds of hazard ratios.
HAZARD_PRIOR = 0.5
LEAST_RATIO, MOST_RATIO = 0.02, 10.0


@compiled
def note(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    known: Known,
    rows: Int64,
    choices: Int64,
    gains: Float64,
    nodes: Float64,
    sizes: Float64,
    row_s: float,
    token_s: float,
    regime: int,
    host_s: float,
    most_debt: float,
) -> None:
    """Learn what every drafter brought every request, and charge the accounts for what was tried.

    rows          int64 [requests]  -1 for one that has ended
    gains, nodes  float64 [requests, drafters]  accepted and bought nodes of each
    host_s        seconds of the host's own work for a step with drafts
    most_debt     seconds: one bad try does not end trying for long
    """
    is_host_paid = (choices != LEFT_OUT).sum() > (choices >= TRIED).sum()
    for drafter in range(choices.shape[1]):
        own = choices[:, drafter]
        is_paid = (own != LEFT_OUT).sum() > (own >= TRIED).sum()
        for request in range(len(rows)):
            gain, bought = gains[request, drafter], nodes[request, drafter]
            choice, row = own[request], rows[request]
            if choice >= TRIED:
                cost = known.costs[drafter]
                taken = cost[QUERY] + row_s * bought
                # Where nobody is asked because it pays, the first trial pays for them all.
                if not is_paid:
                    taken += cost[MESSAGE]
                if not is_host_paid:
                    taken += host_s
                is_paid = is_host_paid = True
                if row >= 0 and not known.is_open[row, drafter]:
                    taken += cost[OPEN_TOKEN] * sizes[request, 0]
                # What it brings pays for what it took, and no more.
                debt = known.balance[drafter, 0] - max(taken - token_s * gain, 0.0)
                known.balance[drafter, 0] = max(debt, -most_debt)
            if row >= 0:
                _note_one(known, known.paths[row], drafter, choice, gain, bought, regime)


@compiled
def _note_one(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    known: Known,
    path: Int64,
    drafter: int,
    choice: int,
    gain: float,
    bought: float,
    regime: int,
) -> None:
    if choice != LEFT_OUT:
        known.is_open[path[2], drafter] = True
    if choice % TRIED == PROBING:
        usual = means(known.levels, path, regime)[drafter, GAIN]
        known.lift[drafter] *= LIFT_DECAY
        known.lift[drafter, 0] += 1.0
        known.lift[drafter, 1] += gain - usual
        return
    # A late proposal brings nodes to a step that did not ask for it.
    if choice == LEFT_OUT and not bought:
        return
    for depth in range(3):
        # A request of no class has the engine's row twice.
        if depth and path[depth] == path[depth - 1]:
            continue
        own = known.levels[path[depth], drafter, regime]
        if choice != LEFT_OUT:
            own *= DECAYS[depth]
            own[WEIGHT] += 1.0
        own[GAIN] += gain
        own[NODES] += bought


@compiled
def credit_nodes(
    attributions: Int32, attribution_ends: Int64, rows: Int32, row_ends: Int64, costs: Float64
) -> tuple[Float64, Float64]:
    """float64 [trees, drafters] twice: each drafter's nodes among the `rows` of a tree, and all.

    Of several that proposed a node, the one of the cheapest query, `costs` [drafters, 3], has it.
    Row 0 is the root, node i is row i + 1.
    """
    gains = np.zeros((len(row_ends), len(costs)))
    nodes = np.zeros((len(row_ends), len(costs)))
    first, first_row = 0, 0
    for tree in range(len(row_ends)):
        owners = _owners(attributions[first : attribution_ends[tree]], costs)
        for owner in owners:
            nodes[tree, owner] += 1
        for index in range(first_row, row_ends[tree]):
            if rows[index]:
                gains[tree, owners[rows[index] - 1]] += 1
        first, first_row = attribution_ends[tree], row_ends[tree]
    return gains, nodes


@compiled
def _owners(attributions: Int32, costs: Float64) -> Int64:
    """int64 [nodes]: the drafter that each node of a tree counts for."""
    size = 0
    for attribution in range(len(attributions)):
        size = max(size, attributions[attribution, NODE] + 1)
    owners = np.full(size, -1, dtype=np.int64)
    for attribution in range(len(attributions)):
        node, drafter = attributions[attribution, NODE], attributions[attribution, DRAFTER]
        if owners[node] < 0 or costs[drafter, QUERY] < costs[owners[node], QUERY]:
            owners[node] = drafter
    return owners


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
