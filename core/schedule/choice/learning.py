"""The compiled loops that learn what drafters bring requests; `core/schedule/choice/kernels.py`
explains the arrays.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Bool, Float64, Int32, Int64
from ...compiled import compiled
from ...tree.kernels import DRAFTER, NODE
from .kernels import (
    BEYOND,
    BEYOND_ALL,
    DECAYS,
    GAIN,
    LEFT_OUT,
    MESSAGE,
    NODES,
    OPEN_TOKEN,
    PROBING,
    QUERY,
    TRIED,
    WEIGHT,
    means,
)
from .known import Known

# The same of what probes bring.
LIFT_DECAY = 0.99
# Hazard that what is known above a class or a request counts for; bounds of hazard ratios.
HAZARD_PRIOR = 0.5
LEAST_RATIO, MOST_RATIO = 0.02, 10.0


@compiled
def note(known: Known, rows: Int64, choices: Int64, credits: Float64, cells: Int64) -> None:
    """Learn what every drafter brought every request.

    rows     int64 [requests]  -1 for one that has ended
    credits  float64 [requests, drafters, 1 + drafters, 3]  as `credit_nodes` has them
    cells    int64 [requests]  as of the plan
    """
    for drafter in range(choices.shape[1]):
        for request in range(len(rows)):
            if rows[request] >= 0:
                path = known.paths[rows[request]]
                own, cell = credits[request, drafter], cells[request]
                _note_one(known, path, drafter, choices[request], own, cell)


@compiled
def charge_trials(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    known: Known,
    rows: Int64,
    choices: Int64,
    saved_s: Float64,
    rows_s: Float64,
    sizes: Float64,
    is_ahead: Bool,
    host_s: Float64,
    most_debt: float,
) -> None:
    """Charge the accounts for what was tried; before `note`, which opens requests.

    rows             int64 [requests]  -1 for one that has ended
    saved_s, rows_s  float64 [requests, drafters]  seconds that nodes of each saved, and took
    sizes, is_ahead, host_s  as of `StepWishes`
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
            num_drafts = sizes[request, 2] if is_ahead[drafter] else 1.0
            taken = message_s + known.costs[drafter, QUERY] * num_drafts + rows_s[request, drafter]
            message_s = 0.0
            if not is_asked[request].any():
                taken += host_s[1]
                is_asked[request, drafter] = True
            if rows[request] >= 0 and not known.is_open[rows[request], drafter]:
                taken += known.costs[drafter, OPEN_TOKEN] * sizes[request, 0]
            # What it brings pays for what it took, and no more.
            debt = known.balance[drafter, 0] - max(taken - saved_s[request, drafter], 0.0)
            known.balance[drafter, 0] = max(debt, -most_debt)


@compiled
def _note_one(  # noqa: PLR0917 - compiled functions take no options by name
    known: Known, path: Int64, drafter: int, choices: Int64, credit: Float64, cell: int
) -> None:
    """`choices` of the request; `credit` of the drafter."""
    own, choice = BEYOND + drafter, choices[drafter]
    if choice == LEFT_OUT:
        # A late proposal brings nodes to a step that did not ask for it.
        if credit[own, NODES]:
            for level in _levels_of(path):
                known.levels[level, drafter, own, cell] += credit[own]
        return
    known.is_open[path[2], drafter] = True
    if choice % TRIED == PROBING:
        usual_gain = means(known.levels, path, cell)[drafter, own, GAIN]
        known.lift[drafter] *= LIFT_DECAY
        known.lift[drafter, 0] += 1.0
        known.lift[drafter, 1] += credit[own, GAIN] - usual_gain
        return
    for depth, level in enumerate(_levels_of(path)):
        decay = DECAYS[len(DECAYS) - 1 if level == path[2] else depth]
        _add(known.levels[level, drafter, :, cell], credit, choices, decay)


@compiled
def _add(sums: Float64, credit: Float64, choices: Int64, decay: float) -> None:
    """A step more; what one that was not asked would have said is not known."""
    for place in range(BEYOND, len(credit)):
        if choices[place - BEYOND] != LEFT_OUT:
            sums[place, WEIGHT] = decay * sums[place, WEIGHT] + 1.0
            for part in (GAIN, NODES):
                sums[place, part] = decay * sums[place, part] + credit[place, part]


@compiled
def _levels_of(path: Int64) -> Int64:
    """The rows to learn into: a request of no class has the engine's row twice."""
    return path if path[1] != path[0] else path[1:]


@compiled
def credit_nodes(
    attributions: Int32, attribution_ends: Int64, rows: Int32, row_ends: Int64, num_drafters: int
) -> Float64:
    """float64 [trees, drafters, 1 + drafters, 3]: nodes of each, as in `Known.levels`, of weight 0.

    Accepted nodes are the `rows` of a tree; row 0 is the root, node i is row i + 1.
    """
    credits = np.zeros((len(row_ends), num_drafters, 1 + num_drafters, 3))
    first, first_row = 0, 0
    for tree in range(len(row_ends)):
        said = attributions[first : attribution_ends[tree]]
        num_nodes = said[:, NODE].max() + 1 if len(said) else 0
        is_accepted = np.zeros(num_nodes)
        for row in rows[first_row : row_ends[tree]]:
            if 0 < row <= num_nodes:
                is_accepted[row - 1] = 1.0
        _credit_tree(credits[tree], said, is_accepted)
        first, first_row = attribution_ends[tree], row_ends[tree]
    return credits


@compiled
def _credit_tree(credits: Float64, attributions: Int32, is_accepted: Float64) -> None:
    num_nodes, num_drafters = len(is_accepted), len(credits)
    said_by = np.zeros((num_nodes, num_drafters), dtype=np.bool_)
    num_saying = np.zeros(num_nodes, dtype=np.int64)
    for attribution in range(len(attributions)):
        node, drafter = attributions[attribution, NODE], attributions[attribution, DRAFTER]
        num_saying[node] += not said_by[node, drafter]
        said_by[node, drafter] = True
    for node in range(num_nodes):
        for drafter in range(num_drafters):
            if not said_by[node, drafter]:
                continue
            own = credits[drafter]
            if num_saying[node] == 1:
                own[BEYOND_ALL, GAIN] += is_accepted[node]
                own[BEYOND_ALL, NODES] += 1.0
            for other in range(num_drafters):
                if other == drafter or not said_by[node, other]:
                    own[BEYOND + other, GAIN] += is_accepted[node]
                    own[BEYOND + other, NODES] += 1.0


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
