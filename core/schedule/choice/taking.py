"""The compiled loops that find a set of drafters that pays for each request of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays import Bool, Float64, Int64
from ...compiled import compiled
from .kernels import ASKED, BEYOND, GAIN, LEFT_OUT, MESSAGE, NODES, StepWishes
from .known import Known

# What is asked is what seemed best, often by chance: so much of what it should save beyond its rows
# counts; these are bought when its nodes are known. All of it does where others would make it too
# dear, so that it is not asked and left out by turns.
SURE_SHARE = 0.8
# Nothing is taken to cost less than this.
LEAST_TAKEN_S = 1e-9


class Expected(NamedTuple):
    """What is expected of drafters behind steps of the requests' reaches.

    brought  float64 [requests, drafters, 1 + drafters, 3]  as `means` of `kernels.py`
    costs_s  float64 [requests, drafters]  seconds of a query, and of an opening's share
    """

    brought: Float64
    costs_s: Float64


@compiled
def worth_asking(
    expected: Expected, known: Known, wishes: StepWishes
) -> tuple[Int64, Float64, float, Float64]:
    """The choices, what each drafter brings beyond those asked, the rows of the step, and seconds
    that a further token saves each request.

    Of two orders the one that makes more of the step counts: by what is saved, after which several
    cheap drafters that say the same as a dear one bring nothing, or by what is saved for what it
    takes, after which a dear one that says more than a cheap one has little left (Leskovec et al.
    2007, CELF).
    """
    best = _in_order(expected, known, wishes, False)
    other = _in_order(expected, known, wishes, True)
    choices, margins, at, token_s, _ = other if other[4] > best[4] else best
    return choices, margins, at, token_s


@compiled
def _in_order(
    expected: Expected, known: Known, wishes: StepWishes, is_by_share: bool
) -> tuple[Int64, Float64, float, Float64, float]:
    """Likewise in one order, and what `_take` made of the step."""
    num_requests, num_drafters = wishes.allowed.shape
    choices = np.zeros((num_requests, num_drafters), dtype=np.int64)
    margins = np.zeros((num_requests, num_drafters, 3))
    is_out = np.zeros((num_requests, num_drafters), dtype=np.bool_)
    # The choices of each request of which nobody was to be ruled out.
    settled = np.full((num_requests, num_drafters), -1)
    at, token_s, made = wishes.base_rows, np.zeros(num_requests), 0.0
    for _ in range(num_drafters):
        choices[:] = LEFT_OUT
        for drafter in range(num_drafters):
            margins[:, drafter] = expected.brought[:, drafter, BEYOND + drafter]
        at, token_s, made = _take(choices, margins, is_out, expected, known, wishes, is_by_share)
        if not _rule_out(choices, settled, is_out, expected, token_s, known, wishes):
            break
    return choices, margins, at, token_s, made


@compiled
def _take(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    choices: Int64,
    margins: Float64,
    is_out: Bool,
    expected: Expected,
    known: Known,
    wishes: StepWishes,
    is_by_share: bool,
) -> tuple[float, Float64, float]:
    """Ask drafters for the requests that each saves time for, one after the other.

    `margins` becomes what each brings beyond those that are asked: no more than beyond any of them.
    Those who are out are not asked. Gives the rows of the step; float64 [requests], seconds that a
    further token saves each: its part of the round, over the tokens that are expected of it; and
    what these worths add up to, the logarithm of the requests' tokens a second, as a mean.

    is_by_share  first comes who saves most for what it takes, not who saves most
    """
    num_requests, num_drafters = choices.shape
    grid, curve_s = wishes.grid, wishes.curve_s
    at, round_s = wishes.base_rows, wishes.plain_s * num_requests
    tokens = np.ones(num_requests)
    is_left = np.ones(num_drafters, dtype=np.bool_)
    nets = np.zeros((num_drafters, num_requests))
    host_s = wishes.host_s[0]
    while True:
        token_s = round_s / max(num_requests, 1) / tokens
        best, most, left = -1, 0.0, np.flatnonzero(is_left)
        # Without `single_s`: nodes that do not save it are not bought when they are known.
        net_seconds(nets, left, margins, expected.costs_s, choices, at, token_s, wishes)
        for drafter in left:
            nets[drafter][is_out[:, drafter]] = 0.0
            shared_s = known.costs[drafter, MESSAGE] + host_s
            worth = _worth(nets[drafter], margins[:, drafter, GAIN], token_s, shared_s, is_by_share)
            if worth > most:
                best, most = int(drafter), worth
        if best < 0:
            return at, token_s, np.log(tokens).sum() / max(num_requests, 1) - np.log(round_s)
        is_left[best] = False
        round_s += host_s + known.costs[best, MESSAGE]
        host_s, first = 0.0, at
        for request in np.flatnonzero(nets[best] > 0):
            round_s += expected.costs_s[request, best]
            round_s += 0.0 if choices[request].any() else wishes.host_s[1]
            tokens[request] += SURE_SHARE * margins[request, best, GAIN]
            at += margins[request, best, NODES]
            choices[request, best] = ASKED
            # Others count for what they bring beyond it.
            _count_beyond(margins[request], best, expected.brought[request])
        round_s += seconds_of_rows(grid, curve_s, at) - seconds_of_rows(grid, curve_s, first)


@compiled
def _worth(
    net: Float64, gains: Float64, token_s: Float64, shared_s: float, is_by_share: bool
) -> float:
    """What drafters are ordered by: the seconds that one saves those requests that it does any, or
    these over what it takes.

    gains, token_s  float64 [requests]  tokens that it brings each, and the seconds that each saves
    shared_s        that it takes for all of them together
    """
    saved_s, gained_s = -shared_s, 0.0
    for request in range(len(net)):
        if net[request] > 0:
            saved_s += net[request]
            gained_s += SURE_SHARE * token_s[request] * gains[request]
    if not is_by_share or saved_s <= 0:
        return saved_s
    return saved_s / max(gained_s - saved_s, LEAST_TAKEN_S)


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
    expected: Expected,
    token_s: Float64,
    known: Known,
    wishes: StepWishes,
) -> bool:
    """Find, for each request, the drafter that the others leave least of what it takes: it is out.

    Several together may say what one says, though none of them does so alone. Gives whether any is.
    """
    row_s = row_seconds(wishes, wishes.base_rows, 1.0)
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
            gain, nodes = beyond_others(expected.brought[request], drafter, own)
            taken_s = expected.costs_s[request, drafter] + shared_s[drafter] + row_s * nodes
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
def net_seconds(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    nets: Float64,
    drafters: Int64,
    margins: Float64,
    costs_s: Float64,
    choices: Int64,
    at: float,
    token_s: Float64,
    wishes: StepWishes,
) -> None:
    """Write what drafters save each request beyond their queries, their rows and the host's work.

    `nets`: float64 [drafters, requests], of which the rows `drafters` are written. What one saves
    nothing for has no rows.
    """
    grid, curve_s, host_s = wishes.grid, wishes.curve_s, wishes.host_s[1]
    first_s = seconds_of_rows(grid, curve_s, at)
    for drafter in drafters:
        num_rows = 0.0
        for request in range(len(choices)):
            gain, nodes = margins[request, drafter, GAIN], margins[request, drafter, NODES]
            net_s = SURE_SHARE * token_s[request] * gain - costs_s[request, drafter]
            if not choices[request].any():
                net_s -= host_s
            nets[drafter, request] = net_s
            if net_s > 0:
                num_rows += nodes
        if not num_rows:
            continue
        num_rows = max(num_rows, 1.0)
        row_s = (seconds_of_rows(grid, curve_s, at + num_rows) - first_s) / num_rows
        for request in range(len(choices)):
            if nets[drafter, request] > 0:
                nets[drafter, request] -= SURE_SHARE * row_s * margins[request, drafter, NODES]


@compiled
def row_seconds(wishes: StepWishes, first: float, count: float) -> float:
    """Mean seconds of each of `count` rows, one at least, beyond the `first`."""
    grid, curve_s, count = wishes.grid, wishes.curve_s, max(count, 1.0)
    first_s = seconds_of_rows(grid, curve_s, first)
    return (seconds_of_rows(grid, curve_s, first + count) - first_s) / count


@compiled
def seconds_of_rows(grid: Float64, curve_s: Float64, rows: float) -> float:
    """Of a round with so many rows. `np.interp` takes several times as long for one number."""
    place = np.searchsorted(grid, rows)
    if place == 0:
        return float(curve_s[0])
    if place == len(grid):
        return float(curve_s[-1])
    share = (rows - grid[place - 1]) / (grid[place] - grid[place - 1])
    return float(curve_s[place - 1] + share * (curve_s[place] - curve_s[place - 1]))
