"""Who drafts for whom, and how many draft tokens are verified.

Both are chosen so that expected tokens a second are largest. `plan` says before a step which
drafters are asked for which requests: what sets of drafters gain is a mean over the last steps that
asked them (`accepted_lengths.py`), what they take is measured. `select` keeps the nodes of the
merged trees that are worth their rows, given what a step of so many rows takes (`step_cost.py`).
Where nothing pays, both leave plain decoding. `update` learns from what a step brought and took. A
small share of the time explores drafters that are left out.

Steps are alike, and share a bucket, if their requests are greedy or sampled and if the step before
accepted as many tokens (`core/steps.py`): texts copy in runs, so the last accepted length
says most of what else would have to be learned of each request. Formulas: docs/how-it-works.md,
"The policy".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..arrays import Bool, Float64, Int64, lengths_of
from ..errors import BestEffort
from ..proposals import DraftCost, Proposal, chain_proposal, level_tokens
from ..steps import NUM_LENGTH_BUCKETS, length_bucket_of
from ..tree.acceptance import MOST_LIKELY, AcceptanceTable
from ..tree.merge import merge
from ..tree.tree import TokenTree, TreeBatch
from ..verify.walk import Paths
from .accepted_lengths import (
    NUM_KEPT,
    AcceptedLengths,
    AskedStep,
    SetPrices,
    accepted_of,
    best_set,
    margin,
    record_lengths,
)
from .draft_plan import (
    NOBODY,
    DraftBatch,
    DraftPlan,
    PlannedRequest,
    StepOutcome,
    ask_everybody,
)
from .learn_acceptance import learn_from_tokens
from .multi_step import MultiStep
from .probe_trials import ProbeTrials
from .step_cost import LineFit, StepCost

# Greedy and sampled requests, by the accepted length of their last step.
NUM_BUCKETS = 2 * NUM_LENGTH_BUCKETS
# Share of the time that goes into exploring; what may be spent so at first, in seconds and in steps
# of plain decoding, and how many times as much is saved up.
EXPLORED_SHARE, FIRST_CREDIT_S, FIRST_CREDIT_STEPS, MOST_CREDIT = 0.01, 0.02, 2.0, 2.0
# Warm-up: steps of each bucket that ask every drafter for one of the requests, at least, and at
# most while the drafter would still pay if one more step brought so many tokens.
LEAST_STEPS, MOST_STEPS, HOPED_FOR = 3, 64, 12.0
# Requests that drafters on trial are asked for at a time: a head has to read the text of each.
MOST_TRIED = 4
# Part of its share of exploring that a drafter gets at least.
LEAST_INTEREST = 0.1
# Plans that a set of drafters is kept for; levels of how unlike others requests are, and the ratio
# from which on that may be chance.
KEPT_PLANS, LEVELS, LIKE_OTHERS = 8, 10, 0.5
# Backoff: most tokens of each request without a plan, after plans that asked no drafter.
MOST_BACKOFF = 32
# Steps that pay for telling a drafter of a request, at most.
HORIZON = 64
# Weight of the newest step in the seconds a token.
RATIO_WEIGHT = 0.02
# Nothing is taken to take less.
LEAST_TAKEN_S = 1e-9
# A token counts for no less than this share of what it takes in plain decoding.
LEAST_RATIO = 0.1
# The engine's own work for drafts: what a measurement leaves of the weight of those before it, the
# squares that a guess counts for, what is an outlier, and the most that is believed of the first.
HOST_DECAY, HOST_SQUARES, HOST_OUTLIER, FIRST_HOST_S = 0.95, 16.0, 4.0, 2e-3
# Rows that the price of one is taken from: of the first nodes, and of those of pipelined trees.
FIRST_NODES, SHARED_ROWS = 8, 32
# What a step leaves of the weight of those before it in shares of accepted lengths, and a token in
# what is known of a request alone.
BUCKET_DECAY, OWN_DECAY = 0.99, 0.98
# Draft tokens by which a request is taken to be like others, and bounds of how unlike it may be.
OWN_PRIOR, LEAST_OWN, MOST_OWN = 4.0, 0.1, 1.5


NO_HEADS = (0,) * NUM_LENGTH_BUCKETS


@dataclass(slots=True)
class _Request:
    """What is known of a request.

    kind   0 if greedy, else 1
    known  bits of the drafters that know the request
    heads  bits of the last stage's heads that draft for the next step, by the accepted length of
           this one
    accepted, expected  draft tokens of late, and as many as the estimates of all requests said
    num_tokens          of its text, up to which these have lost weight
    ratio               how many more draft tokens of it are accepted than of others
    is_tried            drafters on trial are asked for it
    explored            bits of heads that draft for the next step to be explored
    """

    kind: int
    known: int = 0
    heads: Sequence[int] = NO_HEADS
    accepted: float = 0.0
    expected: float = 0.0
    num_tokens: int = 0
    ratio: float = 1.0
    is_tried: bool = False
    explored: int = 0

    def grow_to(self, num_tokens: int) -> None:
        """The text has so many tokens now; with each the request is more like others again."""
        left = OWN_DECAY ** (num_tokens - self.num_tokens)
        self.num_tokens = num_tokens
        self.accepted *= left
        self.expected *= left
        ratio = (self.accepted + OWN_PRIOR) / (self.expected + OWN_PRIOR)
        self.ratio = min(max(ratio, LEAST_OWN), MOST_OWN)


class _Chosen(NamedTuple):
    """What a plan decides about each request; bits of drafters.

    asked     before this step
    heads     of the last stage, which draft for the next step, by the accepted length of this one
    explored  of those asked, the ones that are not known to pay
    read      of those asked, heads that drafted to be explored
    ordered   heads that are to draft for that
    """

    asked: list[int]
    heads: list[Sequence[int]]
    explored: list[int]
    read: list[int]
    ordered: list[int]

    @property
    def is_exploring(self) -> bool:
        """Whether nothing is asked for another reason, or drafted where nothing is accepted."""
        asked = zip(self.asked, self.explored, self.read, strict=True)
        heads = zip(self.heads, self.ordered, strict=True)
        return not (
            any(bits & ~(explored | read) for bits, explored, read in asked)
            or any(after[length_bucket_of(0)] & ~ordered for after, ordered in heads)
        )


class _Load(NamedTuple):
    """What a step of so many requests takes; seconds.

    plain_s   of plain decoding, a token of each
    single_s  that a step of one token each takes longer than its share of a step of several
    row_s     of one of the first nodes
    """

    num_requests: int
    plain_s: float
    single_s: float
    row_s: float

    @property
    def token_s(self) -> float:
        """Of a token in plain decoding."""
        return self.plain_s / self.num_requests


class SpeculationPolicy:
    """Decides before a step which drafters are asked, and then which nodes are verified.

    table  estimates of acceptance, which trees are merged with
    cost   what steps take
    """

    def __init__(
        self,
        cost: StepCost | None = None,
        *,
        is_adaptive: bool = True,
        is_ordered: bool = False,
        multi_step: MultiStep | None = None,
    ) -> None:
        """Without `cost`, rows take no time until steps have been measured; without `multi_step`, a
        step without drafts decodes one token of each request.

        A policy that is not adaptive asks every drafter and keeps all nodes that fit: the most
        valuable ones, or if `is_ordered` those that come first in the order of drafters.
        """
        self.table = AcceptanceTable()
        self.cost = cost or StepCost([1], [1.0])
        self._is_adaptive, self._is_ordered = is_adaptive, is_ordered
        self._multi_step = multi_step or MultiStep()
        self._best_effort = BestEffort()
        self._requests: dict[str, _Request] = {}
        # Drafters, by the ids of the table: seconds of a message, a query, and opening a token;
        # seconds that exploring each may take, and the request whose turn it is.
        self._names: tuple[str, ...] = ()
        self._seconds: Float64 = np.zeros((0, 3))
        self._credit_s: Float64 = np.zeros(0)
        self._turns: Int64 = np.zeros(0, dtype=np.int64)
        self._interests: Float64 = np.zeros(0)
        self._first_credit_s = FIRST_CREDIT_S
        # Bits of the drafters that are there, are heads of the last stage, are on trial.
        self._present = self._in_stage = self._new = 0
        self._lengths = AcceptedLengths.none(NUM_BUCKETS, 0)
        # The best set by bucket, how unlike others the request is, and allowed drafters, as of the
        # last plans.
        self._sets: dict[tuple[int, int, int], int] = {}
        self._probes = ProbeTrials()
        self._num_plans = 0
        # How often steps had each accepted length.
        self._bucket_counts: Float64 = np.ones(NUM_LENGTH_BUCKETS)
        # The engine's own work for drafts: all of it, and since the last step was committed.
        self._host = LineFit(HOST_DECAY)
        self._host_s = 0.0
        # Of late: seconds of steps, and of plain decoding for as many tokens.
        self._spent_s = self._plain_s = 0.0
        self._committed_at, self._last_passes = 0.0, 1
        # Requests that are not planned for, tokens of each that this is so for, and still is.
        self._backed_off: set[str] = set()
        self._backoff = self._backoff_left = 0

    # ---- who is asked

    def plan(
        self,
        requests: Sequence[PlannedRequest],
        costs: Mapping[str, DraftCost],
        num_other_rows: int,
        *,
        may_decode_several: bool = True,
    ) -> DraftPlan:
        """Which drafters are asked for which of the requests that take drafts.

        costs           of each drafter that may be asked, by name
        num_other_rows  rows of the step besides the roots of these requests
        may_decode_several  whether a step without drafts may decode several tokens of each
        """
        if not self._is_adaptive:
            return ask_everybody(requests, costs)
        with self._best_effort:
            self._know(costs)
            load = self._load(len(requests), num_other_rows, may_decode_several)
            return self._plan(requests, costs, load)
        return NOBODY

    def _plan(
        self, requests: Sequence[PlannedRequest], costs: Mapping[str, DraftCost], load: _Load
    ) -> DraftPlan:
        self._num_plans += 1
        if self._num_plans % KEPT_PLANS == 0:
            self._sets.clear()
            self._lengths.value_buckets()
        chosen = _Chosen([], [], [0] * len(requests), [], [0] * len(requests))
        for request in requests:
            own, length_bucket = self._request(request), request.length_bucket
            own.grow_to(request.num_tokens)
            allowed = self._present if request.drafters is None else self._allowed(request)
            on_trial, in_stage = self._on_trial(own, allowed), self._in_stage & allowed
            now = (
                self._paying(own, length_bucket, request, allowed, load) | on_trial
            ) & ~self._in_stage
            after = NO_HEADS
            if in_stage:
                if request.heads_drafted:
                    now |= own.heads[length_bucket] & allowed
                after = [
                    (self._paying(own, one, request, allowed, load) | on_trial) & in_stage
                    for one in _lengths_after(now)
                ]
                after += NO_HEADS[len(after) :]
            chosen.asked.append(now)
            chosen.heads.append(after)
            chosen.read.append(own.explored & now if request.heads_drafted else 0)
        if len(requests) > 1:
            self._drop_unshared(requests, chosen.asked, load)
        # What exploring is expected to take; heads that drafted for it have paid for that.
        explored_s = dict.fromkeys(_bits_of(int(np.bitwise_or.reduce(chosen.read))), 0.0)
        for drafter in _bits_of(self._present & ~self._new):
            if seconds := self._explore(drafter, requests, chosen, load):
                explored_s[drafter] = seconds
        decided = zip(requests, chosen.asked, chosen.heads, chosen.ordered, strict=True)
        for request, bits, after, ordered in decided:
            own = self._requests[request.request_id]
            own.known |= bits
            own.heads, own.explored = after, ordered
        if not any(chosen.asked) and not any(map(any, chosen.heads)):
            self._back_off(request.request_id for request in requests)
            return NOBODY
        self._backed_off.clear()
        self._backoff = self._backoff_left = 0
        return self._as_plan(requests, costs, load, chosen, explored_s)

    def _on_trial(self, own: _Request, allowed: int) -> int:
        """Bits of the drafters that are asked for a request to find out what they are."""
        new = self._new & allowed
        if new and not own.is_tried:
            own.is_tried = sum(one.is_tried for one in self._requests.values()) < MOST_TRIED
        return new if own.is_tried else 0

    def _paying(
        self, own: _Request, length_bucket: int, request: PlannedRequest, allowed: int, load: _Load
    ) -> int:
        """Bits of the set that makes most tokens a second after a step of this accepted length."""
        bucket = own.kind * NUM_LENGTH_BUCKETS + length_bucket
        level = LEVELS if own.ratio >= LIKE_OTHERS else max(round(LEVELS * own.ratio), 1)
        found = self._best_set(bucket, level, allowed, load)
        if not found & ~own.known:
            return found
        for drafter in _bits_of(found & ~own.known):
            # A drafter that does not know the request has to read it, which its steps pay for.
            opening_s = float(self._seconds[drafter, 2]) * request.num_tokens
            most_s = load.token_s * min(request.tokens_left, HORIZON)
            if opening_s > margin(self._lengths, bucket, drafter, 0, 1.0) * most_s:
                found &= ~(1 << drafter)
        return found

    def _best_set(self, bucket: int, level: int, allowed: int, load: _Load) -> int:
        """Bits of the set that makes most tokens a second, as of the last plans."""
        found = self._sets.get((bucket, level, allowed))
        if found is None:
            prices = self._prices(bucket, load)
            found = best_set(self._lengths, bucket, prices, allowed, level / LEVELS)
            self._sets[bucket, level, allowed] = found
        return found

    def _prices(self, bucket: int, load: _Load) -> SetPrices:
        shared_s, each_s = self._host.parts(HOST_SQUARES)
        taken = self._lengths.taken[bucket]
        seconds = np.where(taken > 0, taken, self._seconds[:, :2])
        return SetPrices(
            seconds[:, 1] + seconds[:, 0] / load.num_requests,
            (shared_s + load.single_s) / load.num_requests + each_s,
            load.token_s,
            load.row_s * float(self._lengths.num_nodes[bucket // NUM_LENGTH_BUCKETS]),
        )

    def _drop_unshared(
        self, requests: Sequence[PlannedRequest], asked: list[int], load: _Load
    ) -> None:
        """Leave out drafters whose message takes longer than what few requests save by it: sets
        are priced as if all requests shared it."""
        union, common = int(np.bitwise_or.reduce(asked)), int(np.bitwise_and.reduce(asked))
        for drafter in _bits_of(union & ~common & ~self._in_stage & ~self._new):
            bit, saved_s = 1 << drafter, 0.0
            message_s, query_s, _ = self._seconds[drafter].tolist()
            gains: dict[int, float] = {}
            for request, bits in zip(requests, asked, strict=True):
                if bits & bit:
                    bucket = self._bucket(request)
                    if bucket not in gains:
                        gains[bucket] = margin(self._lengths, bucket, drafter, 0, 1.0)
                    saved_s += gains[bucket] * load.token_s - query_s
            if saved_s < message_s:
                asked[:] = [bits & ~bit for bits in asked]

    def _explore(
        self, drafter: int, requests: Sequence[PlannedRequest], chosen: _Chosen, load: _Load
    ) -> float:
        """Ask a drafter for one request more while it is new to a bucket, and for as many as the
        seconds that were saved up allow where it is left out; how many of these that takes."""
        bit, count, charged_s = 1 << drafter, len(requests), 0.0
        asked, heads, explored, _, ordered = chosen
        is_head = bool(self._in_stage & bit)
        if not is_head and all(bits & bit for bits in asked):
            return 0.0
        message_s, query_s, open_s = self._seconds[drafter].tolist()
        if self._num_plans % KEPT_PLANS == 0:
            self._interests[drafter] = self._interest(drafter, load)
        left_s, spent_s = float(self._credit_s[drafter]), 0.0
        # What a head drafts now was ordered before, and does not pay for what it is to draft next.
        if not any(bits & bit for bits in (chain.from_iterable(heads) if is_head else asked)):
            spent_s += message_s
        if not any(asked):
            spent_s += self._host.parts(HOST_SQUARES)[0] + load.single_s
        first = int(self._turns[drafter])
        for step in range(count):
            place = (first + step) % count
            request = requests[place]
            if not self._allowed(request) & bit:
                continue
            own = self._requests[request.request_id]
            if is_head:
                left_out = [
                    one for one in _lengths_after(asked[place]) if not heads[place][one] & bit
                ]
            else:
                left_out = [] if asked[place] & bit else [request.length_bucket]
            if not left_out:
                continue
            due = []
            if not step and message_s + query_s <= load.plain_s:
                due = [one for one in left_out if self._is_warming_up(drafter, own, one, load)]
            if not due:
                spent_s += query_s + (0.0 if own.known & bit else open_s * request.num_tokens)
                if min(spent_s, self._most_credit_s) > left_s:
                    break
                # One bad try does not end exploring for long.
                self._credit_s[drafter] = max(left_s - spent_s, -self._most_credit_s)
                due, charged_s = left_out, spent_s
                if is_head:
                    ordered[place] |= bit
            if is_head:
                orders = [bits | bit * (one in due) for one, bits in enumerate(heads[place])]
                heads[place] = orders
            else:
                asked[place] |= bit
                explored[place] |= bit
            self._turns[drafter] = place + 1
        return charged_s

    def _is_warming_up(self, drafter: int, own: _Request, length_bucket: int, load: _Load) -> bool:
        """Whether little is known of a drafter, which may still pay beyond all that take less."""
        bucket = own.kind * NUM_LENGTH_BUCKETS + length_bucket
        count = int(self._lengths.num_steps[bucket, drafter])
        if count < LEAST_STEPS or count >= MOST_STEPS:
            return count < LEAST_STEPS
        return self._hoped_for(drafter, bucket, load) >= 1.0

    def _interest(self, drafter: int, load: _Load) -> float:
        """The part of its share of exploring that a drafter gets: one that may hardly pay, in no
        bucket, is explored less often."""
        hopes = [self._hoped_for(drafter, bucket, load) for bucket in range(NUM_BUCKETS)
                 if self._lengths.num_steps[bucket, drafter]]  # fmt: skip
        return min(max(*hopes, LEAST_INTEREST), 1.0) if hopes else 1.0

    def _hoped_for(self, drafter: int, bucket: int, load: _Load) -> float:
        """What a drafter would save beyond all that take less, over what it takes, if one more step
        brought `HOPED_FOR` tokens. An accepted token takes a row at least. Where no drafter pays so
        far, the step itself takes longer, too (`SetPrices.host_s`)."""
        taken_s = self._seconds[:, :2].sum(axis=1)
        cheaper = sum(1 << int(one) for one in np.flatnonzero(taken_s < taken_s[drafter]))
        count = min(int(self._lengths.num_steps[bucket, drafter]), NUM_KEPT)
        hoped = count * margin(self._lengths, bucket, drafter, cheaper, 1.0) + HOPED_FOR
        least_s = max(float(taken_s[drafter]), LEAST_TAKEN_S)
        if not self._best_set(bucket, LEVELS, self._present, load):
            least_s += self._prices(bucket, load).host_s
        saved_s = max(self._ratio * load.token_s - load.row_s, 0.0)
        return float(hoped * saved_s / ((count + 1) * least_s))

    def _as_plan(
        self,
        requests: Sequence[PlannedRequest],
        costs: Mapping[str, DraftCost],
        load: _Load,
        chosen: _Chosen,
        explored_s: Mapping[int, float],
    ) -> DraftPlan:
        asked, heads, *_ = chosen
        ids = [request.request_id for request in requests]
        length_buckets = [request.length_bucket for request in requests]
        self._bucket_counts *= BUCKET_DECAY
        self._bucket_counts += np.bincount(length_buckets, minlength=NUM_LENGTH_BUCKETS) / len(
            length_buckets
        )
        likely = (self._bucket_counts / self._bucket_counts.sum()).tolist()
        by_drafter, orders, counts = {}, {}, {}
        for drafter, name in enumerate(self._names):
            bit = 1 << drafter
            if own := tuple([one for one, bits in zip(ids, asked, strict=True) if bits & bit]):
                by_drafter[name] = own
            if not self._in_stage & bit:
                continue
            after = {
                one: sum(1 << length_bucket for length_bucket, bits in enumerate(own) if bits & bit)
                for one, own in zip(ids, heads, strict=True)
            }
            if any(after.values()):
                orders[name] = {
                    one: length_buckets for one, length_buckets in after.items() if length_buckets
                }
                counts[name] = sum(
                    likely[length_bucket]
                    for length_buckets in after.values()
                    for length_bucket in _bits_of(length_buckets)
                )
        token_s = self._ratio * load.token_s
        return DraftPlan(
            by_drafter,
            self._probes.choose(by_drafter, token_s, lambda rows: rows * load.row_s),
            explored_s={self._names[drafter]: seconds for drafter, seconds in explored_s.items()}
            if chosen.is_exploring
            else {},
            heads=orders,
            head_counts=counts,
            level_tokens={name: level_tokens(costs[name].level_s, token_s) for name in orders},
            step_s=load.plain_s + load.single_s,
            token_s=token_s,
            buckets={
                request.request_id: (request.temperature > 0) * NUM_LENGTH_BUCKETS + length_bucket
                for request, length_bucket in zip(requests, length_buckets, strict=True)
            },
        )

    def _back_off(self, ids: Iterable[str]) -> None:
        """A plan asked no drafter for these: none is asked for a while, longer each time."""
        self._backed_off.update(ids)
        self._backoff = min(max(2 * self._backoff, 1), MOST_BACKOFF)
        self._backoff_left = self._backoff

    def is_backed_off(self, ids: Iterable[str]) -> bool:
        """Whether no drafter is asked for a step of these requests, without a plan for it."""
        if self._backoff_left <= 0 or not self._backed_off.issuperset(ids):
            return False
        self._backoff_left -= self._last_passes
        return True

    def expected(
        self, request: PlannedRequest, costs: Mapping[str, DraftCost], num_running: int
    ) -> frozenset[str]:
        """Drafters that will be asked for a new request, as far as others like it tell."""
        if not self._is_adaptive:
            return frozenset(ask_everybody([request], costs).by_drafter)
        with self._best_effort:
            return self._expected(request, costs, num_running)
        return frozenset()

    def _expected(
        self, request: PlannedRequest, costs: Mapping[str, DraftCost], num_running: int
    ) -> frozenset[str]:
        self._know(costs)
        load, own = self._load(max(num_running, 1), 0, True), self._request(request)
        allowed = self._allowed(request)
        # Nothing was accepted before its first step.
        found = self._on_trial(own, allowed)
        found |= self._paying(own, length_bucket_of(0), request, allowed, load)
        if not found and self._backoff_left > 0:
            self._backed_off.add(request.request_id)
        own.heads = (found & self._in_stage,) * NUM_LENGTH_BUCKETS
        return frozenset(self._names[drafter] for drafter in _bits_of(found))

    # ---- which nodes

    def select(
        self,
        trees: Sequence[TokenTree],
        limits: Sequence[int],
        num_other_rows: int,
        *,
        ids: Sequence[str] = (),
        spent_s: float = 0.0,
        may_decode_several: bool = True,
    ) -> TreeBatch:
        """The trees without the nodes that are not worth their rows.

        A node's value is the probability that the target's path goes through it, the product of
        the estimates along its own path (as in Sequoia and EAGLE-2). The k nodes of largest value
        are kept for the k that makes expected tokens a second largest; k = 0 is plain decoding.

        limits   most nodes of each tree
        ids      of their requests, some of which accept more than others
        spent_s  seconds that drafting took for them
        may_decode_several  as of `plan`
        """
        batch = TreeBatch.of(trees)
        kept = batch.best_of_each(limits)
        if not self._is_adaptive or not len(batch.values):
            return batch.keep(kept)
        values = batch.values
        if ids:
            known = self._requests
            ratios = np.array([known[one].ratio if one in known else 1.0 for one in ids])
            values = np.minimum(values * ratios.repeat(batch.sizes), MOST_LIKELY)
        # Stable, and a node is worth no more than its parent: parents stay where children do.
        order = np.argsort(-np.where(kept, values, -1.0), kind="stable")
        order = order[: np.count_nonzero(kept)]
        tokens = len(batch) + _sums(values[order])
        rows = len(batch) + num_other_rows + np.arange(len(tokens))
        seconds = self.cost.seconds(len(batch), rows)
        plain_s = self._step_s(len(batch), may_decode_several)
        if num_other_rows:
            # They are there whatever is verified, and no token pays for them.
            seconds += plain_s - seconds[0]
        seconds[0] = plain_s
        seconds += spent_s
        kept[:] = False
        kept[order[: int(np.argmax(tokens / seconds))]] = True
        return batch.keep(kept)

    def num_worth(self, values: Float64) -> int:
        """How many of one request's nodes, of falling `values`, make expected tokens a second
        largest; all of them where trees are full."""
        if not self._is_adaptive:
            return len(values)
        tokens = 1.0 + _sums(values)
        return int(np.argmax(tokens / self.cost.seconds(1, 1 + np.arange(len(tokens)))))

    def num_offered(self, proposals: Sequence[Proposal], max_nodes: int) -> int:
        """Nodes of the merged tree that is chosen from: all that drafters propose, so that the
        first drafter takes no room from others."""
        return max_nodes if self._is_ordered else sum(len(p.tokens) for p in proposals)

    @property
    def row_share(self) -> float:
        """What a row takes beside the first, as a share of a step; 0 where nodes take no time."""
        if not self._is_adaptive:
            return 0.0
        alone, beside = self.cost.seconds(1, [1, 1 + SHARED_ROWS]).tolist()
        return max(0.0, beside - alone) / (SHARED_ROWS * alone)

    def num_decode_steps(self, num_requests: int, most: int, *, drafters_asked: bool) -> int:
        """Tokens of each request, at most `most`, in a step without drafts and prompts.

        One where drafters are asked for every token, and had none for this one.
        """
        if drafters_asked and not self._is_adaptive:
            return 1
        return self._multi_step.num_steps(num_requests, self.cost, most)

    # ---- what is learned

    def update(self, outcome: StepOutcome, now: float) -> None:
        """Learn from a committed step; `now` is when, by the engine's clock.

        A step lasts from the commit before, or from its own planning where the engine was idle.
        """
        with self._best_effort:
            self._learn_time(outcome, now)
            if self._is_adaptive and len(outcome.trees):
                self._learn_lengths(outcome)
            if len(outcome.drafted.values):
                learn_from_tokens(self.table, outcome.drafted, outcome.paths)

    def note_probe(self, drafter: str, num_rows: int) -> None:
        """Learn how many rows a drafter wants to probe with, whether it may or not."""
        if self._is_adaptive:
            self._probes.note_rows(drafter, num_rows)

    def note_host(self, seconds: float) -> None:
        """Count the engine's own work for drafts: planning, merging, learning."""
        self._host_s += seconds

    def forget(self, request_id: str) -> None:
        """A request has ended; an unknown id is ignored."""
        self._requests.pop(request_id, None)
        self._backed_off.discard(request_id)
        self._probes.forget(request_id)

    def _learn_lengths(self, outcome: StepOutcome) -> None:
        if len(self.table.names) > len(self._names):
            self._make_room()
        buckets, asked = self._asked_of(outcome)
        if not asked.any():
            return
        batch = TreeBatch.of(outcome.trees)
        sizes, accepted = batch.sizes, lengths_of(outcome.step_paths.ends) - 1
        lengths, expected = accepted_of(
            batch.nodes, batch.values, batch.attributions, batch.attribution_log_probs, batch.ends,
            outcome.step_paths.rows, outcome.step_paths.ends, self.table.counts,
        )  # fmt: skip
        for name, ids in outcome.draft_batch.plan.probing.items():
            drafter = self.table.source_id(name)
            for place, one in enumerate(outcome.ids):
                if one in ids and asked[place]:
                    usual = margin(self._lengths, int(buckets[place]), drafter, 0, 0.0)
                    self._probes.learn(name, float(lengths[place, drafter]) - usual)
        like_others = self._learn_ratios(outcome, sizes, accepted, expected)
        shared_s, each_s = self._host.parts(HOST_SQUARES)
        newest = AskedStep(buckets, asked, lengths, accepted, sizes, like_others)
        record_lengths(
            self._lengths, newest, self._seconds, shared_s / len(outcome.trees) + each_s,
            max(outcome.draft_batch.plan.token_s, LEAST_TAKEN_S),
        )  # fmt: skip

    def _learn_ratios(
        self, outcome: StepOutcome, sizes: Int64, accepted: Int64, expected: Float64
    ) -> Bool:
        """bool [requests]: which of them are like others."""
        found = np.ones(len(outcome.ids), dtype=np.bool_)
        counts = zip(outcome.ids, sizes.tolist(), accepted.tolist(), expected.tolist(), strict=True)
        for place, (one, num_nodes, num_accepted, num_expected) in enumerate(counts):
            own = self._requests.get(one)
            if own is None:
                continue
            if num_nodes and one not in outcome.followers:
                own.accepted += max(num_accepted, 0)
                own.expected += num_expected
            found[place] = own.ratio >= LIKE_OTHERS
        return found

    def _asked_of(self, outcome: StepOutcome) -> tuple[Int64, Int64]:
        """int64 [requests]: the bucket of each, and bits of the drafters that were asked.

        -1 and 0 for requests of which nothing is learned: what was drafted behind other chunks of a
        pipelined tree says nothing of what drafters gain in a step.
        """
        buckets = np.full(len(outcome.ids), -1, dtype=np.int64)
        asked = np.zeros(len(outcome.ids), dtype=np.int64)
        batch = outcome.draft_batch
        places = {
            one: place
            for place, one in enumerate(outcome.ids)
            if one in batch.plan.buckets and one not in outcome.followers
        }
        for one, place in places.items():
            buckets[place] = batch.plan.buckets[one]
        for name, ids in batch.plan.by_drafter.items():
            if name not in batch.skipped:
                bit = 1 << self.table.source_id(name)
                own = [places[one] for one in ids if one in places]
                asked[own] |= bit
        return buckets, asked

    def _learn_time(self, outcome: StepOutcome, now: float) -> None:
        before, self._committed_at = self._committed_at, now
        host_s, self._host_s = self._host_s, 0.0
        batch = outcome.draft_batch
        if num_asked := len(batch.by_request):
            usual_s = HOST_OUTLIER * self._host.mean_y or FIRST_HOST_S
            self._host.record(num_asked, min(host_s, usual_s))
        is_alone = batch.began_at >= before
        step_s = now - max(before, batch.began_at)
        # While other steps are on their way, drafters are asked in the time of these.
        drafting_s = batch.seconds + host_s
        rest_s = (step_s - drafting_s if is_alone else outcome.seconds) - outcome.ahead_s
        count = len(outcome.trees)
        if step_s > 0 and count and not (outcome.num_prompt_rows or outcome.is_pipelined):
            # A step that asked takes longer than one that did not, also if nothing was verified.
            if outcome.num_rows > count or not batch.plan.by_drafter:
                self._learn_cost(outcome, count, max(rest_s, 0.0))
            plain_s = self._step_s(count)
            self._spent_s += RATIO_WEIGHT * (step_s - self._spent_s)
            tokens_s = plain_s * outcome.num_tokens / count
            self._plain_s += RATIO_WEIGHT * (tokens_s - self._plain_s)
            self._save_up(step_s, plain_s)
            self._charge(batch.plan.explored_s, step_s - tokens_s)
        elif outcome.is_pipelined:
            self._save_up(now - before, self._step_s(count))
        self._last_passes = outcome.num_passes

    def _learn_cost(self, outcome: StepOutcome, count: int, rest_s: float) -> None:
        if rest_s and outcome.num_passes > 1:
            each_s = self._multi_step.record(count, outcome.num_passes, rest_s, self.cost)
            # A step of one token takes no less: what is known of it is of shorter contexts.
            if each_s > self.cost.seconds(count, count):
                self.cost.record(count, count, each_s)
        elif rest_s and self._last_passes == 1:
            # One behind a step of several tokens also waits until these have been sent on.
            self.cost.record(count, outcome.num_rows, rest_s)

    def _save_up(self, seconds: float, plain_s: float) -> None:
        """A share of these seconds may be spent on exploring."""
        first = max(FIRST_CREDIT_S, FIRST_CREDIT_STEPS * plain_s, self._first_credit_s)
        more = first - self._first_credit_s + EXPLORED_SHARE * seconds
        self._first_credit_s = first
        # Drafters that have enough, since they are asked anyway, leave the others their part.
        saving = self._credit_s < self._most_credit_s
        share = more / max(int(saving.sum()), 1)
        self._credit_s[saving] += share * self._interests[saving]
        self._probes.save_up(more)

    def _charge(self, explored_s: Mapping[str, float], taken_s: float) -> None:
        """A step that only explored took so much longer than plain decoding of its tokens: drafters
        owe what they were not charged for."""
        owed_s = max(taken_s - sum(explored_s.values()), 0.0) / max(len(explored_s), 1)
        for name in explored_s:
            drafter = self.table.source_id(name)
            left_s = float(self._credit_s[drafter]) - owed_s
            self._credit_s[drafter] = max(left_s, -self._most_credit_s)

    @property
    def _most_credit_s(self) -> float:
        return MOST_CREDIT * self._first_credit_s / max(len(self._names), 1)

    # ---- what is known

    def _know(self, costs: Mapping[str, DraftCost]) -> None:
        """Take note of the drafters that may be asked, and of what they take."""
        for name in costs:
            self.table.source_id(name)
        if len(self.table.names) > len(self._names):
            self._make_room()
        self._present = self._in_stage = self._new = 0
        for drafter, name in enumerate(self._names):
            if (cost := costs.get(name)) is not None:
                self._seconds[drafter] = cost.message_s, cost.query_s, cost.open_token_s
                self._present |= 1 << drafter
                self._in_stage |= cost.is_ahead << drafter
                self._new |= cost.is_new << drafter

    def _make_room(self) -> None:
        self._names = self.table.names
        count = len(self._names)
        more = count - len(self._seconds)
        self._lengths = self._lengths.with_room(count)
        self._seconds = np.vstack([self._seconds, np.zeros((more, 3))])
        self._credit_s = np.full(count, self._first_credit_s / count)
        self._turns = np.append(self._turns, np.zeros(more, dtype=np.int64))
        self._interests = np.append(self._interests, np.ones(more))
        self._sets.clear()

    def _request(self, request: PlannedRequest) -> _Request:
        own = self._requests.get(request.request_id)
        if own is None:
            own = self._requests[request.request_id] = _Request(int(request.temperature > 0))
        return own

    def _bucket(self, request: PlannedRequest) -> int:
        return (request.temperature > 0) * NUM_LENGTH_BUCKETS + request.length_bucket

    def _allowed(self, request: PlannedRequest) -> int:
        """Bits of the drafters that the request takes."""
        if request.drafters is None:
            return self._present
        named = enumerate(self._names)
        return self._present & sum(1 << place for place, name in named if name in request.drafters)

    def _load(self, count: int, num_other_rows: int, may_decode_several: bool) -> _Load:
        plain_s, first = self._step_s(count, may_decode_several), count + num_other_rows
        alone, before, after = self.cost.seconds(
            count, [count, first, first + FIRST_NODES]
        ).tolist()
        row_s = (after - before) / FIRST_NODES
        return _Load(count, plain_s, max(alone - plain_s, 0.0), row_s)

    def _step_s(self, num_requests: int, may_decode_several: bool = True) -> float:
        """Seconds of plain decoding for a token of each request."""
        if may_decode_several:
            return self._multi_step.round_s(num_requests, self.cost)
        return float(self.cost.seconds(num_requests, num_requests))

    @property
    def _ratio(self) -> float:
        """Seconds a token of late, over those of plain decoding."""
        if not self._plain_s:
            return 1.0
        return min(max(self._spent_s / self._plain_s, LEAST_RATIO), 1.0)


def _lengths_after(asked: int) -> range:
    """Length buckets that a step may end in which asks these drafters, bits: without drafts none is
    accepted."""
    return range(NUM_LENGTH_BUCKETS if asked else length_bucket_of(0) + 1)


def _bits_of(bits: int) -> list[int]:
    """The places of the bits that are set."""
    found = []
    while bits:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return found


def _sums(values: Float64) -> Float64:
    """float64 [n + 1]: of none of the values, of the first, of the first two, and so on."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums


def load_policy() -> None:
    """Compile the loops, or load them, so that no step waits for it."""
    policy, costs = SpeculationPolicy(), {"any": DraftCost()}
    request = PlannedRequest("any", 0.0, None, 2, 2)
    for _ in range(2 * LEAST_STEPS):
        policy.expected(request, costs, 1)
        plan = policy.plan([request], costs, 0)
        assert plan.by_drafter, "what is new and takes nothing is asked"
        tree = merge([chain_proposal("any", np.arange(2, dtype=np.int32))], 2, 2, policy.table)
        policy.select([tree], [2], 0)
        outcome = StepOutcome(2, 0.0, 0, DraftBatch({}, 0.0, 0.0, plan, costs))
        outcome.count(["any"], [tree], TreeBatch.of([tree]), Paths.of([[(0, 0, 0), (1, 1, -1)]]))
        policy.update(outcome, 1.0)
