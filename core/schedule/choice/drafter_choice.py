"""Which drafters are asked for which requests, and may probe: by what each brings and takes.

What a drafter brings a request is a mean over the steps that asked it, drawn to what it brings the
requests of its class (namespace and temperature), and that to what it brings the whole engine. So a
new request begins with what is known. What is not known to pay is only tried, from an account that
gets a small share of the time. Formula: docs/how-it-works.md, "The policy".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...arrays import Bool, Float64, Int64
from ...proposals import DraftCost, level_tokens
from ...reach import EVERY_REACH, reach_of
from ...step.ask_plan import AskPlan
from ...tree.tree import TokenTree, TreeBatch
from ...verify.walk import Paths
from .deciding import will_ask
from .kernels import (
    ASKED,
    BEYOND_ALL,
    GAIN,
    LEFT_OUT,
    MESSAGE,
    NODES,
    PROBING,
    TRIED,
    StepWishes,
    regime_of,
)
from .known import BY_ROW, BY_ROW_AND_DRAFTER, cell_of, nothing_known, padded
from .learning import calibrate, charge_trials, credit_nodes, note, ratios
from .planning import plan_step
from .prices import Prices
from .quiet import Quiet
from .wishes import DraftWish

# Lower ends of the classes of temperatures; 0 is greedy.
TEMPERATURES = (1e-6, 0.5, 0.9)
# Classes that are kept apart; the requests of further ones only know the engine's means.
MAX_CLASSES = 256
# An opening is paid for by so many of the request's next steps at most.
HORIZON = 64.0
# Share of the time that may go into trying what is not known to pay, and the host's part of it.
EXPLORED_SHARE = 0.01
HOST_PART = 0.4
# Seconds, or rounds of plain decoding, that a new engine may spend so at once; and how many times
# as much is saved up at most.
FIRST_CREDIT_S, FIRST_CREDIT_ROUNDS = 0.03, 2.0
MOST_CREDIT = 8.0
# Numbers of rows, of which the last is more than a step has.
EVERY_ROW = np.array([0.0, 1e6])
NO_TIME = np.zeros(2)
# Stands for a request that nothing is learned of.
NOBODY = ""
# Weight of the newest probe in the mean number of its rows.
PROBE_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The requests of a committed step.

    ids      NOBODY for one that nothing is learned of
    trees    what was verified of each
    paths    through the trees, whose rows rise
    extra_s  seconds that it took beyond plain decoding for its nodes, as rounds of late tell
    """

    ids: Sequence[str]
    trees: Sequence[TokenTree]
    paths: Paths
    extra_s: float = 0.0


class DrafterChoice:
    """Estimates for every drafter and request, and what follows from them for a step."""

    __slots__ = (
        "_classes", "_first_credit_s", "_free", "_host_s", "_interests",
        "_known", "_names", "_quiet", "_regime", "_requests", "_row_s", "_shares", "_turn",
    )  # fmt: skip

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._known = nothing_known()
        # Row 0 is the engine's.
        self._free = list(range(len(self._known.paths) - 1, 0, -1))
        self._requests: dict[str, int] = {}
        self._classes: dict[tuple[str, int], int] = {}
        self._first_credit_s = FIRST_CREDIT_S
        # Of each account, of what drafters get of trying: as `Known.balance`.
        self._shares: Float64 = np.zeros((0, 2))
        # The part of its share that each drafter gets, as of the last plan.
        self._interests: Float64 = np.zeros(0)
        # What a row took at the margin of the last step.
        self._row_s = 0.0
        self._regime = 0
        # The host's own work for a step with drafts and a request, as of the last plan.
        self._host_s: Float64 = np.zeros(2)
        self._quiet = Quiet()
        self._turn = 0

    def use(self, names: Sequence[str]) -> None:
        """Know these drafters, of which the ones known already come first."""
        more = len(names) - len(self._names)
        if not more:
            return
        self._names = tuple(names)
        known = self._known
        wider = {name: padded(getattr(known, name), 1, more) for name in BY_ROW_AND_DRAFTER}
        wider["levels"] = padded(wider["levels"], 2, more)
        self._known = known._replace(
            **wider,
            costs=padded(known.costs, 0, more),
            lift=padded(known.lift, 0, more),
            probe_rows=padded(known.probe_rows, 0, more),
            turns=padded(known.turns, 0, more),
            balance=np.zeros((len(names), 2)),
        )
        self._share_out()
        self._interests = np.ones(len(names))
        self._known.balance[:] = self._first_balance
        self._known.host[:] = self._first_credit_s * HOST_PART

    def plan(
        self, wishes: Sequence[DraftWish], costs: Mapping[str, DraftCost], prices: Prices
    ) -> AskPlan:
        """Who is asked for the requests of a step. Tries what the account allows.

        Only those that `costs` names are; new ones for all.
        """
        ids = tuple(wish.request_id for wish in wishes)
        # What would take longer than its account holds is tried when that is full.
        self._host_s = np.minimum(prices.host_s, HOST_PART * self._first_credit_s)
        self._regime = regime_of(prices.first_row_s, prices.plain_s)
        self._turn += 1
        wanted = self._wanted(wishes, costs, prices.token_s, prices.plain_s)._replace(
            grid=prices.grid, curve_s=prices.curve_s, base_rows=float(prices.base_rows),
            most_s=self._most_credit_s, single_s=prices.single_s, round_s=prices.round_s,
        )  # fmt: skip
        step = plan_step(self._known, wanted)
        self._interests, self._row_s = step.interests, step.row_s
        if not step.choices.any() and not step.told.any():
            self._quiet.go_on(ids)
            return AskPlan({}, {})
        self._quiet.end()
        by_drafter, probing, trials = self._by_drafter(ids, step.choices)
        ahead = {self._names[place]: own for place, own in _told_by_drafter(ids, step.told)}
        ahead_counts = dict(zip(self._names, step.counts.tolist(), strict=True))
        levels = {name: level_tokens(costs[name].level_s, prices.token_s) for name in ahead}
        return AskPlan(
            by_drafter, probing, ids, step.choices, wanted.sizes, self._row_s, prices.token_s,
            wanted.cells, ahead, ahead_counts, prices.plain_s * len(wishes) + prices.single_s,
            trials, levels,
        )  # fmt: skip

    def is_quiet(self, ids: Iterable[str], num_tokens: int = 1) -> bool:
        """Whether nobody is asked for a step of these requests, as when they were last planned.

        num_tokens: of each that the step before decoded
        """
        return self._quiet.holds(ids, num_tokens)

    def expected(
        self, wish: DraftWish, costs: Mapping[str, DraftCost], plain_s: float
    ) -> frozenset[str]:
        """Drafters that will be asked for a new request, if it is like others of its class.

        plain_s: of a token in plain decoding, among the requests that run
        """
        # Messages are those of the steps that it joins; each row takes what the last one took.
        wanted = self._wanted([wish], costs, plain_s, plain_s)._replace(
            grid=EVERY_ROW, curve_s=EVERY_ROW * self._row_s, host_s=np.array([0.0, self._host_s[1]])
        )
        known = self._known._replace(costs=self._known.costs * (np.arange(3) != MESSAGE))
        pays = will_ask(known, wanted, wanted.cells)[0] != LEFT_OUT
        pays |= wanted.allowed[0] & wanted.is_new
        if not pays.any():
            self._quiet.join(wish.request_id)
        row = wanted.rows[0]
        self._known.ordered[row] = np.where(pays & wanted.is_ahead, ASKED, LEFT_OUT)
        self._known.ordered_after[row] = EVERY_REACH
        return frozenset(self._names[index] for index in pays.nonzero()[0].tolist())

    def pass_time(self, seconds: float, plain_s: float) -> None:
        """Note that a round took so long: a share of it may be spent on trying.

        plain_s: what it takes in plain decoding
        """
        if not self._names:
            return
        first = max(FIRST_CREDIT_S, FIRST_CREDIT_ROUNDS * plain_s)
        # Where rounds are longer than those before, trying takes longer, too.
        more = max(first - self._first_credit_s, 0.0) + EXPLORED_SHARE * seconds
        self._first_credit_s = max(first, self._first_credit_s)
        known = self._known
        host = known.host[0] + more * HOST_PART
        known.host[0] = min(host, HOST_PART * self._first_credit_s)
        # What the host does not need goes to the drafters.
        drafters_s = more * (1 - HOST_PART) + host - known.host[0]
        balance = known.balance + self._shares * self._interests[:, None] * drafters_s
        np.minimum(balance, self._most_credit_s, out=known.balance)

    def charge_host(self, seconds: float) -> None:
        """Charge the host's account for work for trials besides that of their steps."""
        self._known.host[0] = max(self._known.host[0] - seconds, -self._most_debt_s)

    def note_probe(self, drafter: str, num_rows: int) -> None:
        """Note that a drafter wants to probe with so many rows a request."""
        index, probe_rows = self._names.index(drafter), self._known.probe_rows
        is_known = probe_rows[index] > 0
        weight = PROBE_WEIGHT if is_known else 1.0
        probe_rows[index] += weight * (num_rows - probe_rows[index])
        if not is_known:
            self._share_out()
            self._known.balance[index, 1] = self._first_balance[index, 1]

    def learn(self, plan: AskPlan, costs: Mapping[str, DraftCost], step: Verified) -> None:
        """Learn what came of a plan that asked somebody."""
        self._take_costs(costs)
        rows = self._rows_now(step.ids)
        batch = TreeBatch.of(step.trees)
        credits = credit_nodes(
            batch.attributions, batch.ends[1], step.paths.rows, step.paths.ends, len(self._names)
        )
        gains, nodes = credits[..., BEYOND_ALL, GAIN], credits[..., BEYOND_ALL, NODES]
        places = {request_id: place for place, request_id in enumerate(plan.ids)}
        choices = np.zeros(gains.shape, dtype=np.int64)
        cells = np.zeros(len(step.ids), dtype=np.int64)
        sizes = np.zeros((len(step.ids), 3))
        for index, request_id in enumerate(step.ids):
            place = places.get(request_id)
            if place is not None:
                # Drafters may have joined since.
                choices[index, : plan.choices.shape[1]] = plan.choices[place]
                sizes[index], cells[index] = plan.sizes[place], plan.cells[place]
        row_s = plan.row_s
        if nodes.any() and not ((choices != LEFT_OUT) & (choices < TRIED)).any():
            # Without the trials it would have been a plain step.
            row_s = step.extra_s / nodes.sum()
        charge_trials(
            self._known, rows, choices, plan.token_s * gains, row_s * nodes, sizes,
            _bools(name in costs and costs[name].is_ahead for name in self._names),
            self._host_s, self._most_debt_s,
        )  # fmt: skip
        note(self._known, rows, choices, credits, cells)

    def calibrate(self, ids: Sequence[str], judged: Float64) -> None:
        """Learn float64 [requests, 2]: failures, and the hazard that was gone through."""
        calibrate(self._known, self._rows_now(ids), judged)

    def hazard_ratios(self, ids: Sequence[str]) -> Float64:
        """float64 [requests]: how much more often their drafts fail than the values say."""
        return ratios(self._known, self._rows_now(ids))

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        self._quiet.leave(request_id)
        row = self._requests.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    @property
    def _first_balance(self) -> Float64:
        """float64 [drafters, 2]: what each account begins with, and the most that it may owe."""
        return (1 - HOST_PART) * self._first_credit_s * self._shares

    @property
    def _most_debt_s(self) -> float:
        """Of one account: one bad try does not end trying for long."""
        return float(self._first_balance[:, 0].max(initial=0.0))

    @property
    def _most_credit_s(self) -> float:
        """Of one account."""
        return MOST_CREDIT * float(self._first_balance.max(initial=0.0))

    def _share_out(self) -> None:
        """Equal parts for the accounts of drafters, and of the probes of those that probe."""
        in_use = np.ones((len(self._names), 2))
        in_use[:, 1] = self._known.probe_rows > 0
        self._shares = in_use / in_use.sum()

    def _rows_now(self, ids: Sequence[str]) -> Int64:
        """Rows of the requests; -1 for those that have ended or take no drafts."""
        return np.array([self._requests.get(one, -1) for one in ids], dtype=np.int64)

    def _wanted(
        self,
        wishes: Sequence[DraftWish],
        costs: Mapping[str, DraftCost],
        token_s: float,
        plain_s: float,
    ) -> StepWishes:
        """What requests want to know, where rows take nothing."""
        self._take_costs(costs)
        # First, for it may move the arrays.
        rows = np.array([self._row(wish) for wish in wishes], dtype=np.int64)
        reaches = [reach_of(wish.num_accepted) for wish in wishes]
        cells = [cell_of(self._regime, reach) for reach in reaches]
        sizes = [
            (wish.num_tokens, min(wish.tokens_left, HORIZON), 1.0 / wish.miss_shares[reach])
            for wish, reach in zip(wishes, reaches, strict=True)
        ]
        named = [costs.get(name) for name in self._names]
        return StepWishes(
            rows=rows,
            allowed=self._allowed(wishes, costs),
            sizes=np.array(sizes, dtype=np.float64).reshape(len(wishes), 3),
            grid=EVERY_ROW,
            curve_s=NO_TIME,
            base_rows=0.0,
            token_s=token_s,
            plain_s=plain_s,
            cells=np.array(cells, dtype=np.int64),
            most_s=0.0,
            host_s=self._host_s,
            single_s=0.0,
            round_s=0.0,
            is_new=_bools(cost is not None and cost.is_new for cost in named),
            is_ahead=_bools(cost is not None and cost.is_ahead for cost in named),
            is_undrafted=_bools(wish.is_undrafted for wish in wishes),
            turn=self._turn,
        )

    def _take_costs(self, costs: Mapping[str, DraftCost]) -> None:
        for index, name in enumerate(self._names):
            cost = costs.get(name)
            if cost is not None:
                self._known.costs[index] = cost.message_s, cost.query_s, cost.open_token_s

    def _allowed(self, wishes: Sequence[DraftWish], costs: Mapping[str, DraftCost]) -> Bool:
        """bool [wishes, drafters]: whom each takes, of those that there are still."""
        allowed = np.tile(_bools(name in costs for name in self._names), (len(wishes), 1))
        for index, wish in enumerate(wishes):
            if wish.drafters is not None:
                allowed[index] &= [name in wish.drafters for name in self._names]
        return allowed

    def _row(self, wish: DraftWish) -> int:
        row = self._requests.get(wish.request_id)
        if row is None:
            above = self._class_row(wish)
            row = self._requests[wish.request_id] = self._new_row()
            self._known.paths[row] = 0, above, row
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
            count = len(self._known.paths)
            longer = {name: padded(getattr(self._known, name), 0, count) for name in BY_ROW}
            self._known = self._known._replace(**longer)
            self._free = list(range(2 * count - 1, count - 1, -1))
        row = self._free.pop()
        for name in BY_ROW:
            getattr(self._known, name)[row] = 0
        return row

    def _by_drafter(
        self, ids: Sequence[str], choices: Int64
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, frozenset[str]], dict[str, frozenset[str]]]:
        """The requests that each drafter is asked for, probes for, and is tried for."""
        asked: dict[str, tuple[str, ...]] = {}
        probing: dict[str, frozenset[str]] = {}
        trials: dict[str, frozenset[str]] = {}
        for drafter in np.flatnonzero(choices.any(axis=0)).tolist():
            pairs = list(zip(ids, choices[:, drafter].tolist(), strict=True))
            name = self._names[drafter]
            asked[name] = tuple(one for one, choice in pairs if choice)
            probing[name] = frozenset(one for one, choice in pairs if choice % TRIED == PROBING)
            trials[name] = frozenset(one for one, choice in pairs if choice >= TRIED)
        return asked, probing, trials


def _bools(values: Iterable[bool]) -> Bool:
    return np.array([*values], dtype=np.bool_)


def _told_by_drafter(ids: Sequence[str], told: Int64) -> Iterator[tuple[int, dict[str, int]]]:
    """What each drafter is told, by request; of those that are told anything."""
    for drafter in np.flatnonzero(told.any(axis=0)).tolist():
        pairs = zip(ids, told[:, drafter].tolist(), strict=True)
        yield drafter, {request_id: after for request_id, after in pairs if after}
