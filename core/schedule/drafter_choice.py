"""Which drafter is asked for which request, and whether it may probe: by what each brings and costs.

What a drafter brings a request is a mean over the steps that asked it, drawn to what it brings the
requests of its class (namespace and temperature), and that to what it brings the whole engine. So a
new request begins with what is known. What is not known to pay is only tried, from an account that
gets a small share of the time. Formula: docs/algorithms/token_trees.md, "Drafter choice".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from ..arrays import Bool, Float64, Int64
from ..proposals import AskPlan, DraftCost
from ..tree.tree import TokenTree, attribution_ends, node_ends, stacked_attributions
from .choice_kernels import (
    GAIN, NODES, PROBING, QUERY, TRIED, calibrate, credit_nodes, decide, factors, means, note,
)  # fmt: skip

# Lower ends of the classes of temperatures; 0 is greedy.
TEMPERATURES = (1e-6, 0.5, 0.9)
# Classes that are kept apart; the requests of further ones only know the engine's means.
MAX_CLASSES = 256
# An opening is paid for by so many of the request's next rounds at most.
HORIZON = 64.0
# Share of the time that may go into trying what is not known to pay.
EXPLORED_SHARE = 0.02
# Seconds, and rounds, that a new engine may spend so at once; and how many it saves up at most.
FIRST_CREDIT_S, FIRST_CREDIT_ROUNDS = 0.08, 8
MOST_CREDIT_S, MOST_CREDIT_ROUNDS = 0.8, 80
# Where nobody was asked, it is thought over again after so many steps.
QUIET_STEPS = 4
# Weight of the newest probe in the mean number of its rows.
PROBE_WEIGHT = 0.1
# Room for so many requests and classes at first.
FIRST_ROWS = 64


@dataclass(frozen=True, slots=True)
class DraftWish:
    """A request that takes drafts.

    drafters     that it takes; None: all
    num_tokens   of its text
    tokens_left  that its answer may still have
    """

    request_id: str
    temperature: float
    namespace: str
    drafters: tuple[str, ...] | None
    num_tokens: int
    tokens_left: int


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """What time and rows are worth in a step.

    token_s    seconds that an accepted token saves
    grid       float64 [n]  numbers of rows, rising
    curve_s    float64 [n]  seconds of the round with so many
    base_rows  of the step without any nodes
    host_s     seconds of the host's own work for a request that takes drafts
    """

    token_s: float
    grid: Float64
    curve_s: Float64
    base_rows: float
    host_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The requests of a committed step.

    trees   what was verified of each
    rows    of each tree, that the target went through: the root's 0, then those of nodes, rising
    """

    ids: Sequence[str]
    trees: Sequence[TokenTree]
    rows: Sequence[Sequence[int]]


class DrafterChoice:
    """Estimates for every drafter and request, and what follows from them for a step."""

    __slots__ = (
        "_accepts", "_balance", "_classes", "_costs", "_free", "_is_open", "_levels", "_lift", "_names",
        "_nobody", "_paths", "_probe_rows", "_requests", "_row_s", "_slowest_s", "_trials", "_tries", "_turn",
    )  # fmt: skip

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        # Row 0 is the engine's; the others are of classes and requests.
        self._levels = np.zeros((FIRST_ROWS, 0, 3))
        self._paths = np.zeros((FIRST_ROWS, 3), dtype=np.int64)
        self._is_open = np.zeros((FIRST_ROWS, 0), dtype=np.bool_)
        self._tries = np.zeros((FIRST_ROWS, 0, 2))
        self._trials = np.zeros((FIRST_ROWS, 0), dtype=np.int64)
        # Of bought nodes: how many were expected to be accepted, and how many were.
        self._accepts = np.zeros((FIRST_ROWS, 2))
        self._free = list(range(FIRST_ROWS - 1, 0, -1))
        self._requests: dict[str, int] = {}
        self._classes: dict[tuple[str, int], int] = {}
        self._costs = np.zeros((0, 3))
        self._lift = np.zeros((0, 2))
        self._probe_rows = np.zeros(0)
        self._balance = np.zeros((0, 2))
        self._slowest_s = 0.0
        # What a row took at the margin of the last step.
        self._row_s = 0.0
        self._turn = 0
        # The last plan, where it asked nobody.
        self._nobody: AskPlan | None = None

    def use(self, names: Sequence[str]) -> None:
        """Know these drafters, of which the ones known already come first."""
        if len(names) == len(self._names):
            return
        more = len(names) - len(self._names)
        self._names = tuple(names)
        self._levels = _wider(self._levels, more)
        self._is_open = _wider(self._is_open, more)
        self._tries = _wider(self._tries, more)
        self._trials = _wider(self._trials, more)
        self._costs = np.concatenate([self._costs, np.zeros((more, 3))])
        self._lift = np.concatenate([self._lift, np.zeros((more, 2))])
        self._probe_rows = np.concatenate([self._probe_rows, np.zeros(more)])
        self._balance = np.full((len(names), 2), FIRST_CREDIT_S / (2 * len(names)))

    def plan(
        self, wishes: Sequence[DraftWish], costs: Mapping[str, DraftCost], prices: Prices
    ) -> AskPlan:
        """Who is asked for the requests of a step. Tries what the account allows."""
        self._take_costs(costs)
        self._turn += 1
        ids = tuple(wish.request_id for wish in wishes)
        if self._nobody is not None and self._nobody.ids == ids and self._turn % QUIET_STEPS:
            return self._nobody
        rows = np.array([self._row(wish) for wish in wishes], dtype=np.int64)
        sizes = np.array(
            [(wish.num_tokens, min(wish.tokens_left, HORIZON)) for wish in wishes], dtype=np.float64
        )
        choices, row_s = decide(
            self._levels, self._paths, rows, self._allowed(wishes), self._is_open, sizes,
            self._costs, self._lift, self._probe_rows, self._balance, self._tries, self._trials,
            (prices.grid, prices.curve_s), prices.base_rows, prices.token_s, prices.host_s,
            self._turn,
        )  # fmt: skip
        self._row_s = row_s
        if not choices.any():
            self._nobody = AskPlan({}, {}, ids=ids)
            return self._nobody
        self._nobody = None
        by_drafter, probing = self._by_drafter(wishes, choices)
        is_tried = (choices >= TRIED).any(axis=1).tolist()
        tried = frozenset(one for one, is_one in zip(ids, is_tried, strict=True) if is_one)
        return AskPlan(by_drafter, probing, tried, ids, rows, choices, sizes, row_s, prices.token_s)

    def expected(
        self, wish: DraftWish, costs: Mapping[str, DraftCost], token_s: float
    ) -> frozenset[str]:
        """Drafters that will be asked for a new request, if it is like others of its class."""
        self._take_costs(costs)
        # First, for it may move the arrays.
        row = self._row(wish)
        gains = means(self._levels, self._paths[row])
        allowed = self._allowed([wish])[0]
        pays = gains[:, GAIN] * token_s > self._costs[:, QUERY] + gains[:, NODES] * self._row_s
        return frozenset(np.array(self._names, dtype=object)[allowed & pays].tolist())

    def pass_time(self, seconds: float) -> None:
        """Note that a round took so long: a share of it may be spent on trying."""
        if not len(self._balance):
            return
        share = 1 / self._balance.size
        if seconds > self._slowest_s:
            # A slower round than any before: trying costs more, too.
            before = max(FIRST_CREDIT_S, FIRST_CREDIT_ROUNDS * self._slowest_s)
            self._slowest_s = seconds
            self._balance += share * (max(FIRST_CREDIT_S, FIRST_CREDIT_ROUNDS * seconds) - before)
        self._balance += share * EXPLORED_SHARE * seconds
        most = max(MOST_CREDIT_S, MOST_CREDIT_ROUNDS * self._slowest_s)
        np.minimum(self._balance, share * most, out=self._balance)

    def note_probe(self, drafter: str, num_rows: int) -> None:
        """Note that a drafter wants to probe with so many rows a request."""
        index = self._names.index(drafter)
        weight = PROBE_WEIGHT if self._probe_rows[index] else 1.0
        self._probe_rows[index] += weight * (num_rows - self._probe_rows[index])

    def learn(self, plan: AskPlan, costs: Mapping[str, DraftCost], step: Verified) -> None:
        """Learn what came of a plan."""
        self._take_costs(costs)
        rows = self._rows_now(step.ids)
        gains, nodes = credit_nodes(
            stacked_attributions(step.trees),
            attribution_ends(step.trees),
            np.array(list(chain.from_iterable(step.rows)), dtype=np.int32),
            np.array(list(accumulate(map(len, step.rows))), dtype=np.int64),
            self._costs,
        )
        calibrate(
            self._accepts,
            self._paths,
            rows,
            np.concatenate([tree.values for tree in step.trees]),
            node_ends(step.trees),
            gains.sum(axis=1),
        )
        if not plan.by_drafter:
            return
        places = {request_id: place for place, request_id in enumerate(plan.ids)}
        choices = np.zeros(gains.shape, dtype=np.int64)
        sizes = np.zeros((len(step.ids), 2))
        for index, request_id in enumerate(step.ids):
            place = places.get(request_id)
            if place is not None:
                choices[index], sizes[index] = plan.choices[place], plan.sizes[place]
        note(
            self._levels, self._paths, rows, choices, gains, nodes,
            self._costs, self._lift, self._balance, self._is_open,
            sizes, plan.row_s, plan.token_s,
        )  # fmt: skip

    def factors(self, ids: Sequence[str]) -> Float64:
        """float64 [requests]: how much likelier nodes are accepted in each than their values say."""
        return factors(self._accepts, self._paths, self._rows_now(ids))

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        row = self._requests.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def _rows_now(self, ids: Sequence[str]) -> Int64:
        """Rows of the requests; -1 for those that have ended or take no drafts."""
        return np.array([self._requests.get(one, -1) for one in ids], dtype=np.int64)

    def _take_costs(self, costs: Mapping[str, DraftCost]) -> None:
        for index, name in enumerate(self._names):
            cost = costs.get(name)
            if cost is not None:
                self._costs[index] = cost.message_s, cost.query_s, cost.open_token_s

    def _allowed(self, wishes: Sequence[DraftWish]) -> Bool:
        allowed = np.ones((len(wishes), len(self._names)), dtype=np.bool_)
        for index, wish in enumerate(wishes):
            if wish.drafters is not None:
                allowed[index] = [name in wish.drafters for name in self._names]
        return allowed

    def _row(self, wish: DraftWish) -> int:
        row = self._requests.get(wish.request_id)
        if row is None:
            above = self._class_row(wish)
            row = self._requests[wish.request_id] = self._new_row()
            self._paths[row] = 0, above, row
        return row

    def _class_row(self, wish: DraftWish) -> int:
        warmth = sum(wish.temperature >= bound for bound in TEMPERATURES)
        key = (wish.namespace, warmth)
        row = self._classes.get(key)
        if row is None:
            if len(self._classes) >= MAX_CLASSES:
                return 0
            row = self._classes[key] = self._new_row()
        return row

    def _new_row(self) -> int:
        if not self._free:
            count = len(self._levels)
            self._levels = np.concatenate([self._levels, np.zeros_like(self._levels)])
            self._paths = np.concatenate([self._paths, np.zeros_like(self._paths)])
            self._is_open = np.concatenate([self._is_open, np.zeros_like(self._is_open)])
            self._tries = np.concatenate([self._tries, np.zeros_like(self._tries)])
            self._trials = np.concatenate([self._trials, np.zeros_like(self._trials)])
            self._accepts = np.concatenate([self._accepts, np.zeros_like(self._accepts)])
            self._free = list(range(2 * count - 1, count - 1, -1))
        row = self._free.pop()
        self._levels[row] = 0.0
        self._is_open[row] = False
        self._tries[row] = 0.0
        self._trials[row] = 0
        self._accepts[row] = 0.0
        return row

    def _by_drafter(
        self, wishes: Sequence[DraftWish], choices: Int64
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, frozenset[str]]]:
        asked: dict[str, tuple[str, ...]] = {}
        probing: dict[str, frozenset[str]] = {}
        for drafter in choices.any(axis=0).nonzero()[0].tolist():
            column = choices[:, drafter].tolist()
            pairs = [(w.request_id, choice) for w, choice in zip(wishes, column, strict=True)]
            name = self._names[drafter]
            asked[name] = tuple(one for one, choice in pairs if choice)
            probing[name] = frozenset(one for one, choice in pairs if choice % TRIED == PROBING)
        return asked, probing


def _wider(array: np.ndarray, more: int) -> np.ndarray:
    shape = (array.shape[0], more, *array.shape[2:])
    return np.concatenate([array, np.zeros(shape, dtype=array.dtype)], axis=1)


def everyone(wishes: Sequence[DraftWish], names: Iterable[str]) -> AskPlan:
    """Every drafter that they take is asked for all requests, and may probe for them."""
    by_drafter = {
        name: asked
        for name in names
        if (
            asked := tuple(
                wish.request_id
                for wish in wishes
                if wish.drafters is None or name in wish.drafters
            )
        )
    }
    return AskPlan(by_drafter, {name: frozenset(ids) for name, ids in by_drafter.items()})
