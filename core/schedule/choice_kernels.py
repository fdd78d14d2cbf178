"""The compiled loops that choose drafters for the requests of a step, and learn what came of it.

`core/schedule/drafter_choice.py` explains the estimates. Arrays:

accepts   float64 [rows, 2]  decayed sums of the values of bought nodes, and of the accepted ones
levels    float64 [rows, drafters, 3]  of the engine, the classes and the requests: decayed sums of
          the steps that asked a drafter, of its accepted nodes, and of its bought nodes
paths     int64 [rows, 3]  the rows of the engine, the class and the request, of each request's row
rows      int64 [requests]  of the requests of a step; -1 for one that has ended
sizes     float64 [requests, 2]  tokens of the text, and rounds that an opening may be paid in
costs     float64 [drafters, 3]  seconds of a message, of a query and of opening a token of text
lift      float64 [drafters, 2]  decayed sums of steps with probes, and of what these brought more
probe_rows  float64 [drafters]  rows of its probes; 0: it sends none
balance   float64 [drafters, 2]  seconds that may go into trying a drafter, and its probes
is_open   bool [rows, drafters]  whether a drafter knows a request
tries     float64 [rows, drafters, 2]  of a class: the step from which a drafter may be tried for it
          again, and how many steps lay between the last tries
trials    int64 [rows, drafters]  rounds that a request's probes are still tried for
choices   int64 [requests, drafters]  LEFT_OUT, ASKED or PROBING, plus TRIED where it is a trial
"""

from __future__ import annotations

import numpy as np

from ..arrays import Bool, Float64, Int32, Int64
from ..compiled import compiled
from ..tree.kernels import DRAFTER, NODE

# Steps that the means of the engine, a class and a request count for before they have seen any.
PRIORS = np.array([1.0, 2.0, 1.0])
# What one more step leaves of the weight of those before it: of the engine, a class and a request.
DECAYS = np.array([0.99, 0.98, 0.95])
# What a step that did not ask leaves of the weight of what is known of a request.
RECALL = 0.98
# Steps until a drafter that is left out is tried again for a class: ever more, up to a bound.
GAP_GROWTH, MOST_GAP = 1.25, 64.0
# The prior and the decay of what probes bring.
LIFT_PRIOR, LIFT_DECAY = 16.0, 0.99
# Rounds in a row that a request's probes are tried for: what they find is proposed later.
PROBE_TRIAL = 24

# Expected nodes that what is known above a class or a request counts for.
ACCEPTS_PRIOR = 4.0
MOST_FACTOR = 4.0

WEIGHT, GAIN, NODES = range(3)
MESSAGE, QUERY, OPEN_TOKEN = range(3)
LEFT_OUT, ASKED, PROBING = range(3)
TRIED = 4


@compiled
def means(levels: Float64, path: Int64) -> Float64:
    """float64 [drafters, 3]: what is expected of each at the end of a path of levels.

    Of the weight column 0; the others are the expected accepted and bought nodes of a step.
    """
    expected = np.zeros(levels.shape[1:])
    for drafter in range(levels.shape[1]):
        for depth in range(3):
            own = levels[path[depth], drafter]
            total = own[WEIGHT] + PRIORS[depth]
            for part in (GAIN, NODES):
                before = PRIORS[depth] * expected[drafter, part]
                expected[drafter, part] = (own[part] + before) / total
    return expected


@compiled
def decide(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    levels: Float64,
    paths: Int64,
    rows: Int64,
    allowed: Bool,
    is_open: Bool,
    sizes: Float64,
    costs: Float64,
    lift: Float64,
    probe_rows: Float64,
    balance: Float64,
    tries: Float64,
    trials: Int64,
    curve: tuple[Float64, Float64],
    base_rows: float,
    token_s: float,
    host_s: float,
    turn: int,
) -> tuple[Int64, float]:
    """int64 [requests, drafters] choices, and the seconds of a row at the margin.

    Drafters are taken by falling worth, so that each pays for the rows that it adds to those
    before it; those whose rows, message and queries together are not worth their tokens are left
    out. Then each may be tried for one request more, as far as its account goes.
    """
    num_requests, num_drafters = allowed.shape
    choices = np.zeros((num_requests, num_drafters), dtype=np.int64)
    worth = np.zeros((num_requests, num_drafters))
    nodes = np.zeros((num_requests, num_drafters))
    total = np.zeros(num_drafters)
    for request in range(num_requests):
        expected = means(levels, paths[rows[request]])
        for drafter in range(num_drafters):
            nodes[request, drafter] = expected[drafter, NODES]
            cost = costs[drafter, QUERY] + host_s
            if not is_open[rows[request], drafter]:
                opening = costs[drafter, OPEN_TOKEN] * sizes[request, 0]
                cost += opening / max(sizes[request, 1], 1.0)
            own = expected[drafter, GAIN] * token_s - cost if allowed[request, drafter] else -1.0
            worth[request, drafter] = own
            total[drafter] += max(own, 0.0)
    at, row_s = base_rows, 0.0
    for drafter in np.argsort(-total):
        wanted = 0.0
        for request in range(num_requests):
            if worth[request, drafter] > 0:
                wanted += nodes[request, drafter]
        row_s = _row_seconds(curve, at, wanted)
        left, bought = -costs[drafter, MESSAGE], 0.0
        for request in range(num_requests):
            net = worth[request, drafter] - row_s * nodes[request, drafter]
            if worth[request, drafter] > 0 and net > 0:
                choices[request, drafter] = ASKED
                left += net
                bought += nodes[request, drafter]
        if left <= 0:
            choices[:, drafter] = LEFT_OUT
        else:
            at += bought
            for request in range(num_requests):
                if choices[request, drafter] == ASKED:
                    tries[paths[rows[request], 1], drafter] = 0.0
        _explore(
            choices, drafter, rows, paths, allowed, is_open, sizes, costs, balance, tries,
            worth[:, drafter] - row_s * nodes[:, drafter], turn,
        )  # fmt: skip
        if probe_rows[drafter] > 0:
            gain = lift[drafter, 1] / (lift[drafter, 0] + LIFT_PRIOR) * token_s
            price = _row_seconds(curve, at, probe_rows[drafter]) * probe_rows[drafter]
            _probe(choices, drafter, rows, trials, balance, gain - price)
    for request in range(num_requests):
        for drafter in range(num_drafters):
            if choices[request, drafter] == LEFT_OUT:
                levels[rows[request], drafter] *= RECALL
    return choices, row_s


@compiled
def _row_seconds(curve: tuple[Float64, Float64], first: float, count: float) -> float:
    """Mean seconds of each of `count` rows, one at least, beyond the `first`."""
    count = max(count, 1.0)
    after = np.interp(first + count, curve[0], curve[1])
    return float((after - np.interp(first, curve[0], curve[1])) / count)


@compiled
def _explore(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    choices: Int64,
    drafter: int,
    rows: Int64,
    paths: Int64,
    allowed: Bool,
    is_open: Bool,
    sizes: Float64,
    costs: Float64,
    balance: Float64,
    tries: Float64,
    net: Float64,
    turn: int,
) -> None:
    """Ask a drafter for one request that it is not known to pay for, if its account allows.

    In turns one that it knows already, which costs no opening, and one that it does not know.
    """
    count, message_s = len(rows), costs[drafter, MESSAGE]
    if balance[drafter, 0] <= 0:
        return
    for request in range(count):
        if choices[request, drafter] != LEFT_OUT:
            message_s = 0.0
    best = -1
    for step in range(count):
        request = (step + turn) % count
        row = rows[request]
        is_due = tries[paths[row, 1], drafter, 0] <= turn
        if choices[request, drafter] != LEFT_OUT or not allowed[request, drafter] or not is_due:
            continue
        loss = message_s - min(net[request], 0.0)
        if not is_open[row, drafter]:
            loss += costs[drafter, OPEN_TOKEN] * sizes[request, 0]
        if loss <= balance[drafter, 0] and (
            best < 0 or is_open[row, drafter] == (turn % 2 == 1) != is_open[rows[best], drafter]
        ):
            best = request
    if best >= 0:
        choices[best, drafter] = ASKED + TRIED
        last = tries[paths[rows[best], 1], drafter]
        last[1] = min(max(last[1], 1.0) * GAP_GROWTH, MOST_GAP)
        last[0] = turn + last[1]


@compiled
def _probe(  # noqa: PLR0917 - compiled functions take no options by name
    choices: Int64, drafter: int, rows: Int64, trials: Int64, balance: Float64, net: float
) -> None:
    """Let the asked requests probe where it pays; else try it for one, for some rounds in a row."""
    trying = False
    for request in range(len(rows)):
        choice = choices[request, drafter]
        if choice == LEFT_OUT:
            continue
        if net > 0:
            choices[request, drafter] += PROBING - ASKED
        elif trials[rows[request], drafter] > 0:
            trials[rows[request], drafter] -= 1
            choices[request, drafter] += PROBING - ASKED
            trying = True
    if net > 0 or trying or -net * PROBE_TRIAL > balance[drafter, 1]:
        return
    for request in range(len(rows)):
        if choices[request, drafter] == ASKED:
            trials[rows[request], drafter] = PROBE_TRIAL
            balance[drafter, 1] += net * PROBE_TRIAL
            return


@compiled
def note(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    levels: Float64,
    paths: Int64,
    rows: Int64,
    choices: Int64,
    gains: Float64,
    nodes: Float64,
    costs: Float64,
    lift: Float64,
    balance: Float64,
    is_open: Bool,
    sizes: Float64,
    row_s: float,
    token_s: float,
) -> None:
    """Learn what every drafter brought every request, and charge the accounts for what was tried.

    gains, nodes  float64 [requests, drafters]  accepted and bought nodes of each
    """
    num_requests, num_drafters = choices.shape
    for drafter in range(num_drafters):
        num_asked = 0
        for request in range(num_requests):
            num_asked += choices[request, drafter] != LEFT_OUT
        for request in range(num_requests):
            gain, bought = gains[request, drafter], nodes[request, drafter]
            choice, row = choices[request, drafter], rows[request]
            if choice >= TRIED:
                taken = costs[drafter, QUERY] + row_s * bought
                if num_asked == 1:
                    taken += costs[drafter, MESSAGE]
                if row >= 0 and not is_open[row, drafter]:
                    taken += costs[drafter, OPEN_TOKEN] * sizes[request, 0]
                # What it brings pays for what it took, and no more.
                balance[drafter, 0] -= max(taken - token_s * gain, 0.0)
            if row < 0:
                continue
            if choice == LEFT_OUT:
                if bought:
                    _add(levels, paths[row], drafter, 0.0, gain, bought)
                continue
            is_open[row, drafter] = True
            if choice % TRIED == PROBING:
                usual = means(levels, paths[row])[drafter, GAIN]
                lift[drafter] *= LIFT_DECAY
                lift[drafter, 0] += 1.0
                lift[drafter, 1] += gain - usual
            else:
                _add(levels, paths[row], drafter, 1.0, gain, bought)


@compiled
def _add(  # noqa: PLR0917 - compiled functions take no options by name
    levels: Float64, path: Int64, drafter: int, weight: float, gain: float, bought: float
) -> None:
    for depth in range(3):
        # A request of no class has the engine's row twice.
        if depth and path[depth] == path[depth - 1]:
            continue
        own = levels[path[depth], drafter]
        if weight:
            own *= DECAYS[depth]
        own[WEIGHT] += weight
        own[GAIN] += gain
        own[NODES] += bought


@compiled
def credit_nodes(
    attributions: Int32, attribution_ends: Int64, rows: Int32, row_ends: Int64, costs: Float64
) -> tuple[Float64, Float64]:
    """float64 [trees, drafters] twice: the nodes of each tree among its `rows`, and all, by drafter.

    Of several that proposed a node, the one of the cheapest query, `costs` [drafters, 3], has it.
    Row 0 is the root, node i is row i + 1; the rows of a tree rise.
    """
    num_trees, num_drafters = len(row_ends), len(costs)
    gains = np.zeros((num_trees, num_drafters))
    nodes = np.zeros((num_trees, num_drafters))
    first, first_row = 0, 0
    for tree in range(num_trees):
        size = 0
        for attribution in range(first, attribution_ends[tree]):
            size = max(size, attributions[attribution, NODE] + 1)
        owners = np.full(size, -1, dtype=np.int64)
        for attribution in range(first, attribution_ends[tree]):
            node, drafter = attributions[attribution, NODE], attributions[attribution, DRAFTER]
            owner = owners[node]
            if owner < 0 or costs[drafter, QUERY] < costs[owner, QUERY]:
                owners[node] = drafter
        for owner in owners:
            if owner >= 0:
                nodes[tree, owner] += 1
        for index in range(first_row + 1, row_ends[tree]):
            owner = owners[rows[index] - 1]
            if owner >= 0:
                gains[tree, owner] += 1
        first, first_row = attribution_ends[tree], row_ends[tree]
    return gains, nodes


@compiled
def factors(accepts: Float64, paths: Int64, rows: Int64) -> Float64:
    """float64 [requests]: accepted nodes over expected ones; 1 where nothing is known."""
    found = np.ones(len(rows))
    for index in range(len(rows)):
        if rows[index] >= 0:
            for depth in range(1, 3):
                own = accepts[paths[rows[index], depth]]
                accepted = own[1] + ACCEPTS_PRIOR * found[index]
                found[index] = accepted / (own[0] + ACCEPTS_PRIOR)
    return np.minimum(found, MOST_FACTOR)


@compiled
def calibrate(  # noqa: PLR0917 - compiled functions take no options by name
    accepts: Float64, paths: Int64, rows: Int64, values: Float64, ends: Int64, accepted: Float64
) -> None:
    """Learn what was accepted of trees whose nodes' `values`, one tree behind the other, promised it."""
    first = 0
    for tree in range(len(ends)):
        if rows[tree] >= 0 and ends[tree] > first:
            expected = values[first : ends[tree]].sum()
            for depth in range(1, 3):
                own = accepts[paths[rows[tree], depth]]
                own *= DECAYS[depth]
                own[0] += expected
                own[1] += accepted[tree]
        first = ends[tree]
