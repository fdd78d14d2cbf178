"""The compiled loops that choose drafters for the requests of a step; see `drafter_choice.py`."""

from __future__ import annotations

import numpy as np

from ...arrays import Bool, Float64, Int64
from ...compiled import compiled
from .kernels import (
    ASKED,
    BEYOND,
    GAIN,
    LEFT_OUT,
    MESSAGE,
    NODES,
    OPEN_TOKEN,
    PROBING,
    QUERY,
    TRIED,
    StepWishes,
    class_means,
    means_of_request,
)
from .known import Known

# What a token that nobody was asked for leaves of the weight of what is known of a request.
RECALL = 0.985
# What is asked is what seemed best, often by chance: so much of what it should save beyond its rows
# counts; these are bought when its nodes are known. All of it does where others would make it too
# dear, so that it is not asked and left out by turns.
SURE_SHARE = 0.8
# Steps that probes are taken to bring nothing for, before they have brought any.
LIFT_PRIOR = 16.0
# Steps in a row that a request's probes are tried for: what they find is proposed later.
PROBE_TRIAL = 24


@compiled
def decide(known: Known, wishes: StepWishes) -> tuple[Int64, float]:
    """int64 [requests, drafters] choices, and the seconds of a row at the margin.

    The drafter that saves most is taken, then the one that does so beyond it, and so on, each
    paying for the message, the rows and the host's work that it adds; where the others
    together leave one too little, they are taken anew without it. Then each may be tried for
    further requests, as far as its account goes.
    """
    expected, costs_s = _expected(known, wishes, wishes.cells)
    choices, margins, at, token_s = _worth_asking(expected, costs_s, known, wishes)
    is_drafting = choices.any()
    host_s = 0.0 if is_drafting else wishes.host_s[0]
    single_s = 0.0 if is_drafting else wishes.single_s
    for drafter in range(choices.shape[1]):
        own = choices[:, drafter]
        message_s = 0.0 if own.any() else known.costs[drafter, MESSAGE]
        # Not for a few requests only: the host works about as long for one as for many.
        if host_s <= min(max(known.host[0], 0.0), max(known.balance[drafter, 0], 0.0)):
            net = _net_seconds(drafter, margins, costs_s, choices, at, token_s, wishes)
            _explore(own, drafter, known, wishes, net, message_s)
            if choices.any():
                host_s = 0.0
        if known.probe_rows[drafter] > 0:
            _choose_probes(own, drafter, known, wishes, at, single_s)
    _recall(choices, known, wishes)
    return choices, _row_seconds(wishes, at, 1.0)


@compiled
def will_ask(known: Known, wishes: StepWishes, cells: Int64) -> Int64:
    """int64 [requests, drafters]: who is asked because it pays; nobody is tried.

    cells  int64 [requests]  in place of those of the step
    """
    expected, costs_s = _expected(known, wishes, cells)
    return _worth_asking(expected, costs_s, known, wishes)[0]


@compiled
def _worth_asking(
    expected: Float64, costs_s: Float64, known: Known, wishes: StepWishes
) -> tuple[Int64, Float64, float, Float64]:
    """The choices, what each drafter brings beyond those asked, the rows of the step, and seconds
    that a further token saves each request.
    """
    num_requests, num_drafters = wishes.allowed.shape
    choices = np.zeros((num_requests, num_drafters), dtype=np.int64)
    margins = np.zeros((num_requests, num_drafters, 3))
    is_out = np.zeros((num_requests, num_drafters), dtype=np.bool_)
    # The choices of each request of which nobody was to be ruled out.
    settled = np.full((num_requests, num_drafters), -1)
    at, token_s = wishes.base_rows, np.zeros(num_requests)
    for _ in range(num_drafters):
        choices[:] = LEFT_OUT
        for drafter in range(num_drafters):
            margins[:, drafter] = expected[:, drafter, BEYOND + drafter]
        at, token_s = _take(choices, margins, is_out, expected, costs_s, known, wishes)
        if not _rule_out(choices, settled, is_out, expected, costs_s, token_s, known, wishes):
            break
    return choices, margins, at, token_s


@compiled
def _take(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    choices: Int64,
    margins: Float64,
    is_out: Bool,
    expected: Float64,
    costs_s: Float64,
    known: Known,
    wishes: StepWishes,
) -> tuple[float, Float64]:
    """Ask drafters for the requests that each saves time for, first the one that saves most.

    `margins` becomes what each brings beyond those that are asked: no more than beyond any of them.
    Those who are out are not asked. Gives the rows of the step and float64 [requests], seconds that
    a further token saves each: its part of the round, over the tokens that are expected of it.
    """
    at, round_s = wishes.base_rows, wishes.plain_s * len(choices)
    tokens = np.ones(len(choices))
    is_left = np.ones(choices.shape[1], dtype=np.bool_)
    while True:
        token_s = round_s / len(choices) / tokens
        best, most, best_net = -1, 0.0, np.zeros(0)
        host_s = 0.0 if choices.any() else wishes.host_s[0]
        for drafter in range(len(is_left)):
            if not is_left[drafter]:
                continue
            # Without `single_s`: nodes that do not save it are not bought when they are known.
            net = _net_seconds(drafter, margins, costs_s, choices, at, token_s, wishes)
            net[is_out[:, drafter]] = 0.0
            saved_s = net[net > 0].sum() - known.costs[drafter, MESSAGE] - host_s
            if saved_s > most:
                best, most, best_net = drafter, saved_s, net
        if best < 0:
            return at, token_s
        is_left[best] = False
        round_s += host_s + known.costs[best, MESSAGE]
        first = at
        for request in np.flatnonzero(best_net > 0):
            round_s += costs_s[request, best]
            if not choices[request].any():
                round_s += wishes.host_s[1]
            tokens[request] += margins[request, best, GAIN]
            at += margins[request, best, NODES]
            choices[request, best] = ASKED
            # Others count for what they bring beyond it.
            _count_beyond(margins[request], best, expected[request])
        round_s += _round_seconds(wishes, at) - _round_seconds(wishes, first)


@compiled
def _count_beyond(margins: Float64, drafter: int, expected: Float64) -> None:
    """Leave of what each of a request's drafters brings what it brings beyond `drafter`, too.

    `margins` are beyond those before. What they said already of `drafter` takes nothing away again:
    of two that say the same the second one counts for nothing.
    """
    own = expected[drafter, BEYOND + drafter, GAIN]
    novelty = margins[drafter, GAIN] / own if own > 0 else 0.0
    for other in range(len(margins)):
        if other == drafter:
            continue
        for part in (GAIN, NODES):
            alone = expected[other, BEYOND + other, part]
            beyond = expected[other, BEYOND + drafter, part]
            if alone > beyond:
                share = beyond / alone
                share = share if novelty == 1.0 else share**novelty
                margins[other, part] = min(margins[other, part] * share, beyond)


@compiled
def _rule_out(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    choices: Int64,
    settled: Int64,
    is_out: Bool,
    expected: Float64,
    costs_s: Float64,
    token_s: Float64,
    known: Known,
    wishes: StepWishes,
) -> bool:
    """Find, for each request, the drafter that the others leave least of what it takes: it is out.

    Several together may say what one says, though none of them does so alone. Gives whether any is.
    """
    row_s = _row_seconds(wishes, wishes.base_rows, 1.0)
    num_asked = np.maximum((choices != LEFT_OUT).sum(axis=0), 1)
    shared_s = known.costs[:, MESSAGE] / num_asked
    is_any = False
    for request in range(len(choices)):
        own = choices[request]
        if np.count_nonzero(own) < 2 or (own == settled[request]).all():
            continue
        worst, least_s = -1, 0.0
        for drafter in range(len(own)):
            if own[drafter] == LEFT_OUT:
                continue
            gain, nodes = beyond_others(expected[request], drafter, own)
            taken_s = costs_s[request, drafter] + shared_s[drafter] + row_s * nodes
            left_s = token_s[request] * gain - taken_s
            if left_s < least_s:
                worst, least_s = drafter, left_s
        if worst >= 0:
            is_out[request, worst] = is_any = True
        else:
            settled[request] = own
    return is_any


@compiled
def beyond_others(expected: Float64, drafter: int, choices: Int64) -> tuple[float, float]:
    """Gain and nodes of a drafter that no other one of a request's brings."""
    count = len(choices)
    margins = np.zeros((count, 3))
    for one in range(count):
        margins[one] = expected[one, BEYOND + one]
    for other in range(count):
        if other != drafter and choices[other] != LEFT_OUT:
            _count_beyond(margins, other, expected)
    return margins[drafter, GAIN], margins[drafter, NODES]


@compiled
def _net_seconds(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    drafter: int,
    margins: Float64,
    costs_s: Float64,
    choices: Int64,
    at: float,
    token_s: Float64,
    wishes: StepWishes,
) -> Float64:
    """float64 [requests]: what a drafter saves each beyond its query, its rows and the host's work.

    What it saves nothing for has no rows.
    """
    count = len(choices)
    own, num_rows = np.zeros(count), 0.0
    for request in range(count):
        gain, nodes = margins[request, drafter, GAIN], margins[request, drafter, NODES]
        own[request] = SURE_SHARE * token_s[request] * gain - costs_s[request, drafter]
        if not choices[request].any():
            own[request] -= wishes.host_s[1]
        if own[request] > 0:
            num_rows += nodes
    if num_rows:
        row_s = SURE_SHARE * _row_seconds(wishes, at, num_rows)
        for request in range(count):
            if own[request] > 0:
                own[request] -= row_s * margins[request, drafter, NODES]
    return own


@compiled
def _row_seconds(wishes: StepWishes, first: float, count: float) -> float:
    """Mean seconds of each of `count` rows, one at least, beyond the `first`."""
    count = max(count, 1.0)
    return (_round_seconds(wishes, first + count) - _round_seconds(wishes, first)) / count


@compiled
def _round_seconds(wishes: StepWishes, rows: float) -> float:
    """Of a round with so many rows. `np.interp` takes several times as long for one number."""
    grid, curve_s = wishes.grid, wishes.curve_s
    place = np.searchsorted(grid, rows)
    if place == 0:
        return float(curve_s[0])
    if place == len(grid):
        return float(curve_s[-1])
    share = (rows - grid[place - 1]) / (grid[place] - grid[place - 1])
    return float(curve_s[place - 1] + share * (curve_s[place] - curve_s[place - 1]))


@compiled
def _recall(choices: Int64, known: Known, wishes: StepWishes) -> None:
    """Let a request be more like its class with each token that a drafter was not asked for."""
    for request in range(len(wishes.rows)):
        row, num_tokens = wishes.rows[request], wishes.sizes[request, 0]
        left = RECALL ** (num_tokens - known.planned[row])
        known.planned[row] = num_tokens
        for drafter in range(len(known.costs)):
            if choices[request, drafter] == LEFT_OUT:
                known.levels[row, drafter, :, wishes.cells[request]] *= left


@compiled
def _expected(known: Known, wishes: StepWishes, cells: Int64) -> tuple[Float64, Float64]:
    """float64 [requests, drafters, 1 + drafters, 3] and [requests, drafters].

    What `means` expects of a drafter; seconds of its query, and of an opening's share.
    """
    num_drafters = wishes.allowed.shape[1]
    expected = np.zeros((*wishes.allowed.shape, 1 + num_drafters, 3))
    costs_s = np.full(wishes.allowed.shape, 1.0)
    above, above_of = np.zeros((0, 0, 0)), (-1, -1)
    for request in range(len(wishes.rows)):
        row, cell = wishes.rows[request], cells[request]
        path = known.paths[row]
        if (path[1], cell) != above_of:
            above, above_of = class_means(known.levels, path, cell), (path[1], cell)
        own = means_of_request(above, known.levels, row, cell)
        for drafter in range(len(known.costs)):
            if not wishes.allowed[request, drafter]:
                continue
            costs_s[request, drafter] = known.costs[drafter, QUERY]
            if not known.is_open[row, drafter]:
                opening_s = known.costs[drafter, OPEN_TOKEN] * wishes.sizes[request, 0]
                costs_s[request, drafter] += opening_s / max(wishes.sizes[request, 1], 1.0)
            expected[request, drafter] = own[drafter]
    return expected, costs_s


@compiled
def _explore(  # noqa: PLR0917 - compiled functions take no options by name
    choices: Int64, drafter: int, known: Known, wishes: StepWishes, net: Float64, message_s: float
) -> None:
    """Ask a drafter for requests that it is not known to pay for, in turns, if its account allows.

    Only nodes that are worth their rows are bought of what it proposes; all are judged later.
    """
    left = known.balance[drafter, 0]
    count = len(choices)
    first = known.turns[drafter]
    for step in range(count):
        request = (first + step) % count
        if choices[request] != LEFT_OUT or not wishes.allowed[request, drafter]:
            continue
        loss = message_s - min(net[request], 0.0)
        if not known.is_open[wishes.rows[request], drafter]:
            loss += known.costs[drafter, OPEN_TOKEN] * wishes.sizes[request, 0]
        if min(loss, wishes.most_s) <= left:
            choices[request] = ASKED + TRIED
            known.turns[drafter] = request + 1
            left -= loss
            message_s = 0.0
            # What was never asked may take any time: it is found out with one.
            if not first:
                break


@compiled
def _choose_probes(  # noqa: PLR0917 - compiled functions take no options by name
    choices: Int64, drafter: int, known: Known, wishes: StepWishes, at: float, single_s: float
) -> None:
    """Let the asked requests probe where it pays; else try it for one, for some steps in a row."""
    count = known.probe_rows[drafter]
    gain_s = wishes.token_s * known.lift[drafter, 1] / (known.lift[drafter, 0] + LIFT_PRIOR)
    net = gain_s - single_s - _row_seconds(wishes, at, count) * count
    if net > 0:
        choices += np.where(choices != LEFT_OUT, PROBING - ASKED, 0)
        return
    newcomer = -1
    for request in range(len(choices)):
        if choices[request] == LEFT_OUT:
            continue
        trials = known.trials[wishes.rows[request]]
        if trials[drafter] > 0:
            trials[drafter] -= 1
            choices[request] += PROBING - ASKED
            return
        if choices[request] == ASKED:
            newcomer = request
    cost_s = min(-net * PROBE_TRIAL, wishes.most_s)
    if newcomer >= 0 and cost_s <= known.balance[drafter, 1]:
        known.trials[wishes.rows[newcomer], drafter] = PROBE_TRIAL
        known.balance[drafter, 1] -= cost_s
