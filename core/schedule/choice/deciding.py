"""The compiled loops that choose drafters for the requests of a step; see `drafter_choice.py`."""

from __future__ import annotations

import numpy as np

from ...arrays import Float64, Int64
from ...compiled import compiled
from .kernels import (
    ASKED,
    LEFT_OUT,
    MESSAGE,
    OPEN_TOKEN,
    PROBING,
    QUERY,
    TRIED,
    StepWishes,
    class_means,
    means_of_request,
)
from .known import Known
from .taking import Expected, net_seconds, row_seconds, worth_asking

# What a token that nobody was asked for leaves of the weight of what is known of a request.
RECALL = 0.985
# Steps that probes are taken to bring nothing for, before they have brought any.
LIFT_PRIOR = 16.0
# Steps in a row that a request's probes are tried for: what they find is proposed later.
PROBE_TRIAL = 24


@compiled
def decide(known: Known, wishes: StepWishes) -> tuple[Int64, float]:
    """int64 [requests, drafters] choices, and the seconds of a row at the margin.

    The best drafter is taken, then the one that is best beyond it, and so on, each paying for the
    message, the rows and the host's work that it adds; where the others together leave one too
    little, they are taken anew without it. Then each may be tried for further requests, as far as
    its account goes.
    """
    expected = _expected(known, wishes, wishes.cells)
    choices, margins, at, token_s = worth_asking(expected, known, wishes)
    is_drafting = choices.any()
    host_s = 0.0 if is_drafting else wishes.host_s[0]
    single_s = 0.0 if is_drafting else wishes.single_s
    nets = np.zeros(choices.T.shape)
    for drafter in range(choices.shape[1]):
        own = choices[:, drafter]
        message_s = 0.0 if own.any() else known.costs[drafter, MESSAGE]
        # Not for a few requests only: the host works about as long for one as for many.
        if host_s <= min(max(known.host[0], 0.0), max(known.balance[drafter, 0], 0.0)):
            places = np.array([drafter])
            net_seconds(nets, places, margins, expected.costs_s, choices, at, token_s, wishes)
            _explore(choices, drafter, known, wishes, nets[drafter], message_s)
            if choices.any():
                host_s = 0.0
        if known.probe_rows[drafter] > 0:
            _choose_probes(own, drafter, known, wishes, at, single_s)
    _recall(choices, known, wishes)
    return choices, row_seconds(wishes, at, 1.0)


@compiled
def will_ask(known: Known, wishes: StepWishes, cells: Int64) -> Int64:
    """int64 [requests, drafters]: who is asked because it pays; nobody is tried.

    cells  int64 [requests]  in place of those of the step
    """
    return worth_asking(_expected(known, wishes, cells), known, wishes)[0]


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
def _expected(known: Known, wishes: StepWishes, cells: Int64) -> Expected:
    """Behind steps of these cells."""
    num_drafters = wishes.allowed.shape[1]
    brought = np.zeros((*wishes.allowed.shape, 1 + num_drafters, 3))
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
            brought[request, drafter] = own[drafter]
    return Expected(brought, costs_s)


@compiled
def _explore(  # noqa: PLR0917 - compiled functions take no options by name
    choices: Int64,
    drafter: int,
    known: Known,
    wishes: StepWishes,
    net: Float64,
    message_s: float,
) -> None:
    """Ask a drafter for requests that it is not known to pay for, in turns, if its account allows.

    Only nodes that are worth their rows are bought of what it proposes; all are judged later.
    """
    left = known.balance[drafter, 0]
    count = len(choices)
    first = known.turns[drafter]
    for step in range(count):
        request = (first + step) % count
        if choices[request, drafter] != LEFT_OUT or not wishes.allowed[request, drafter]:
            continue
        loss = message_s - min(net[request], 0.0)
        if not known.is_open[wishes.rows[request], drafter]:
            loss += known.costs[drafter, OPEN_TOKEN] * wishes.sizes[request, 0]
        if min(loss, wishes.most_s) <= left:
            choices[request, drafter] = ASKED + TRIED
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
    net = gain_s - single_s - row_seconds(wishes, at, count) * count
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
