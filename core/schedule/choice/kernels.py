"""The compiled loops that choose drafters for the requests of a step.

`drafter_choice.py` explains the estimates, `learning.py` has the loops that learn them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays import Bool, Float64, Int64
from ...compiled import compiled
from .known import NUM_REGIMES, REGIMES, Known

# Steps that the means of the engine, a class and a request count for before they have seen any.
PRIORS = np.array([1.0, 2.0, 3.0])
# What a token that nobody was asked for leaves of the weight of what is known of a request.
RECALL = 0.98
# What is asked is what seemed best, often by chance: so much of what it should bring counts.
SURE_SHARE = 0.8
# Steps that probes are taken to bring nothing for, before they have brought any.
LIFT_PRIOR = 16.0
# The best drafter by itself takes the place of several where it is so much better than they are.
BEST_MARGIN = 1.05
# Trials of what brings too little for what it takes are fewer, down to this part of them.
LEAST_INTEREST = 0.25
# Steps in a row that a request's probes are tried for: what they find is proposed later.
PROBE_TRIAL = 24


# Steps, then accepted and bought nodes: of those that count for a drafter (`credit_nodes`), of all
# that it proposed, and of those that nobody else did.
WEIGHT, GAIN, NODES, ALONE_GAIN, ALONE_NODES, ONLY_GAIN, ONLY_NODES = range(7)
NUM_COLUMNS = 7
MESSAGE, QUERY, OPEN_TOKEN = range(3)
# In place of what counts for drafters one by one: the best one by itself, and what others add.
LEFT_OUT, ASKED, PROBING, BEST = range(4)
# Added to a choice that is a trial.
TRIED = 4


class StepWishes(NamedTuple):
    """The requests of a step, and what time is worth in it.

    rows       int64 [requests]  in `Known`
    allowed    bool [requests, drafters]  whom each takes
    sizes      float64 [requests, 2]  tokens of the text, and steps that an opening may be paid in
    grid       float64 [n]  numbers of rows, rising
    curve_s    float64 [n]  seconds of the round with so many
    base_rows  of the step without any nodes
    token_s    seconds that an accepted token saves
    plain_s    seconds of a token in plain decoding
    regime     `regime_of` the step's prices
    most_s     that an account holds: what would take longer is tried when it is full
    host_s     float64 [2]  that the host works for a step with drafts, and for each request with
               drafts, whoever is asked
    single_s   that a step takes longer than plain decoding if it has any nodes or probes at all
    """

    rows: Int64
    allowed: Bool
    sizes: Float64
    grid: Float64
    curve_s: Float64
    base_rows: float
    token_s: float
    plain_s: float
    regime: int
    most_s: float
    host_s: Float64
    single_s: float


def regime_of(row_s: float, token_s: float) -> int:
    """The range of the price of a row in tokens of plain decoding.

    What is bought depends on it, so what drafters bring is learned for each range by itself.
    """
    return sum(row_s >= bound * token_s for bound in REGIMES)


@compiled
def means(levels: Float64, path: Int64, regime: int) -> Float64:
    """float64 [drafters, 7]: what is expected of each at the end of a path of levels.

    Of the weight column 0; the others are the expected nodes of a step, as in `Known.levels`. What
    the engine expects is drawn to what it knows from the nearest other range of prices.
    """
    expected = np.zeros((levels.shape[1], NUM_COLUMNS))
    for drafter in range(levels.shape[1]):
        engine = levels[path[0], drafter]
        nearest = _nearest_known(engine, regime)
        for part in range(GAIN, NUM_COLUMNS):
            expected[drafter, part] = engine[nearest, part] / (engine[nearest, WEIGHT] + PRIORS[0])
        for depth in range(3):
            own = levels[path[depth], drafter, regime]
            total = own[WEIGHT] + PRIORS[depth]
            for part in range(GAIN, NUM_COLUMNS):
                before = PRIORS[depth] * expected[drafter, part]
                expected[drafter, part] = (own[part] + before) / total
    return expected


@compiled
def _nearest_known(engine: Float64, regime: int) -> int:
    """Another regime that has steps, of two as near the one of dearer rows, where less is bought;
    where there is none, one without steps.
    """
    for distance in range(1, NUM_REGIMES):
        for other in (regime + distance, regime - distance):
            if 0 <= other < NUM_REGIMES and engine[other, WEIGHT] > 0:
                return other
    return 0 if regime else NUM_REGIMES - 1


@compiled
def decide(known: Known, wishes: StepWishes) -> tuple[Int64, float]:
    """int64 [requests, drafters] choices, and the seconds of a row at the margin.

    Drafters are taken by falling worth, so that each pays for the rows, and the host's work, that
    it adds to those before it. Then each may be tried for further requests, as far as its account
    goes.
    """
    expected, costs_s = _expected(known, wishes)
    gains, nodes = SURE_SHARE * expected[:, :, GAIN], expected[:, :, NODES].copy()
    choices = np.zeros(wishes.allowed.shape, dtype=np.int64)
    value_s, price_s = np.zeros(len(choices)), wishes.plain_s
    at, row_s, is_drafting = wishes.base_rows, 0.0, False
    worth = gains * wishes.token_s - costs_s
    for drafter in np.argsort(-np.maximum(worth, 0.0).sum(axis=0)):
        message_s = known.costs[drafter, MESSAGE]
        host_s = 0.0 if choices.any() else wishes.host_s[0]
        # Where it would not pay beside other drafts, it may pay instead of plain decoding.
        for token_s in (wishes.token_s, wishes.plain_s):
            saved_s = gains[:, drafter] * token_s - costs_s[:, drafter]
            net, row_s = _net_seconds(saved_s, nodes[:, drafter], choices, at, wishes)
            # Without `single_s`: nodes that do not save it are not bought when they are known.
            pays = np.maximum(net, 0.0).sum() > message_s + host_s
            if pays or is_drafting:
                break
        if pays:
            price_s = price_s if is_drafting else token_s
            is_drafting = True
            choices[:, drafter] = np.where(net > 0, ASKED, LEFT_OUT)
            value_s += np.maximum(net, 0.0) - (net > 0) * message_s / max((net > 0).sum(), 1)
            at += (nodes[:, drafter] * (net > 0)).sum()
            message_s = host_s = 0.0
        # Not for a few requests only: the host works about as long for one as for many.
        if host_s <= min(max(known.host[0], 0.0), max(known.balance[drafter, 0], 0.0)):
            _explore(choices[:, drafter], drafter, known, wishes, net, message_s)
        if known.probe_rows[drafter] > 0:
            single_s = 0.0 if is_drafting else wishes.single_s
            _choose_probes(choices[:, drafter], drafter, known, wishes, at, single_s)
    _take_best(choices, value_s, expected, costs_s, price_s, known, wishes)
    _recall(choices, known, wishes)
    return choices, row_s


@compiled
def interests(known: Known, wishes: StepWishes) -> Float64:
    """float64 [drafters]: what each may bring at best over what it takes, between `LEAST_INTEREST`
    and 1: so much of its account's income it gets.

    What is hardly known may bring anything: a step more is added to what it brought, of one token.
    """
    every = means(known.levels, np.zeros(3, dtype=np.int64), wishes.regime)
    num_requests = max(len(wishes.rows), 1)
    found = np.ones(len(every))
    for drafter in range(len(every)):
        weight = known.levels[0, drafter, :, WEIGHT].sum()
        gain = (weight * every[drafter, GAIN] + 1.0) / (weight + 1.0)
        together_s = known.costs[drafter, MESSAGE] + wishes.host_s[0]
        taken_s = together_s / num_requests + known.costs[drafter, QUERY] + wishes.host_s[1]
        if taken_s > 0:
            found[drafter] = min(max(gain * wishes.plain_s / taken_s, LEAST_INTEREST), 1.0)
    return found


@compiled
def _take_best(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    choices: Int64,
    value_s: Float64,
    expected: Float64,
    costs_s: Float64,
    token_s: float,
    known: Known,
    wishes: StepWishes,
) -> None:
    """Let the best drafter by itself take the place of those that were chosen one by one, where it
    saves more than they: the cheaper ones may have hidden it, each of them with a part of it.

    Others stay with it for what nobody else says. `token_s` is what the first one was chosen by.
    """
    if not known.costs.size:
        return
    message_s = known.costs[:, MESSAGE] / len(choices)
    row_s = _row_seconds(wishes, wishes.base_rows, 1.0)
    for request in range(len(choices)):
        host_s = wishes.host_s[1] + wishes.host_s[0] / len(choices)
        means_of = expected[request]
        alone = _saved(means_of, ALONE_GAIN, token_s, row_s) - costs_s[request] - message_s
        best = np.argmax(np.where(wishes.allowed[request], alone, -np.inf))
        only = _saved(means_of, ONLY_GAIN, token_s, row_s) - costs_s[request] - message_s
        only[best] = 0.0
        others = wishes.allowed[request] & (only > 0)
        saved_s = alone[best] - host_s + (only * others).sum()
        if saved_s <= BEST_MARGIN * max(value_s[request], 0.0):
            continue
        for drafter in range(len(alone)):
            if choices[request, drafter] < TRIED:
                stays = drafter == best or others[drafter]
                choices[request, drafter] = BEST if stays else LEFT_OUT


@compiled
def _saved(means_of: Float64, gain: int, token_s: float, row_s: float) -> Float64:
    """float64 [drafters]: seconds that nodes save beyond their rows; `gain` is their column."""
    return SURE_SHARE * token_s * means_of[:, gain] - row_s * means_of[:, gain + 1]


@compiled
def _recall(choices: Int64, known: Known, wishes: StepWishes) -> None:
    """Let a request be more like its class with each token that a drafter was not asked for."""
    for request in range(len(wishes.rows)):
        row, num_tokens = wishes.rows[request], wishes.sizes[request, 0]
        left = RECALL ** (num_tokens - known.planned[row])
        known.planned[row] = num_tokens
        for drafter in range(len(known.costs)):
            if choices[request, drafter] == LEFT_OUT:
                known.levels[row, drafter, wishes.regime] *= left


@compiled
def _expected(known: Known, wishes: StepWishes) -> tuple[Float64, Float64]:
    """float64 [requests, drafters, 7] and [requests, drafters].

    What `means` expects of a drafter; seconds of its query, and of an opening's share.
    """
    expected = np.zeros((*wishes.allowed.shape, NUM_COLUMNS))
    costs_s = np.full(wishes.allowed.shape, 1.0)
    for request in range(len(wishes.rows)):
        row = wishes.rows[request]
        own = means(known.levels, known.paths[row], wishes.regime)
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
def _net_seconds(
    saved_s: Float64, nodes: Float64, choices: Int64, at: float, wishes: StepWishes
) -> tuple[Float64, float]:
    """float64 [requests]: what a drafter saves each beyond its rows and the host's work.

    And the seconds of a row. What it saves nothing for has no rows.
    """
    own = saved_s - _host_seconds(choices, wishes)
    row_s = _row_seconds(wishes, at, (nodes * (own > 0)).sum())
    return np.where(own > 0, own - row_s * nodes, np.minimum(own, 0.0)), row_s


@compiled
def _host_seconds(choices: Int64, wishes: StepWishes) -> Float64:
    """float64 [requests]: what the host works for one that nobody is asked for yet."""
    seconds = np.zeros(len(choices))
    for request in range(len(choices)):
        if not choices[request].any():
            seconds[request] = wishes.host_s[1]
    return seconds


@compiled
def _row_seconds(wishes: StepWishes, first: float, count: float) -> float:
    """Mean seconds of each of `count` rows, one at least, beyond the `first`."""
    count = max(count, 1.0)
    after = np.interp(first + count, wishes.grid, wishes.curve_s)
    return float((after - np.interp(first, wishes.grid, wishes.curve_s)) / count)


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
