"""How far drafters' tokens were accepted, and which set of drafters makes most tokens a second.

All proposals of a request form one tree, of which the target accepts one path. So what a drafter
gained in a step is the depth down to which its nodes lie on that path, and what a set of drafters
gained is the largest of these depths. The last steps that asked a drafter are kept together with
what the others gained in them, so that what it adds to others is a mean of measured differences.

Steps are kept by bucket (`policy.py`): what is gained depends on how far the step before came. So
an accepted token brings more than itself: the steps behind it accept more than those behind a step
without any. This later gain is the value of the bucket that a step leads to, as in a Markov chain
with rewards (Howard 1960); where asking costs more than a first token saves, it decides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Bool, Float32, Float64, Int32, Int64
from ..compiled import compiled
from ..steps import BUCKET_LENGTHS, NUM_LENGTH_BUCKETS
from ..tree.acceptance import estimate
from ..tree.tree import DEPTH, DRAFTED_DEPTH, DRAFTER, NODE, RANK

# Steps that are kept of each drafter, and steps without any gain that a mean begins with.
NUM_KEPT, PRIOR_STEPS = 256, 1.0
# A drafter alone would have had a node verified if the node's value, by its own estimates, is not
# below this share of the least value in the step: estimates move in between.
SOLD_SHARE = 0.9
# What a step leaves of the weight of those before it in where steps lead.
MOVE_DECAY = 0.995
# What a token of the next step counts for: so one state that is never left has a finite value.
LATER_DISCOUNT = 0.98
# Weights of the newest measurement: of a step in what drafters take in its bucket, of a token in
# the nodes that are verified for it, and of the nodes of a step at most.
TAKEN_WEIGHT, NODE_WEIGHT, MOST_NODE_WEIGHT = 0.15, 0.02, 0.5


class AcceptedLengths(NamedTuple):
    """The last steps of each bucket and drafter.

    kept   float32 [buckets, drafters, NUM_KEPT, drafters]  of the last steps that asked a drafter:
           the depth down to which nodes of each drafter were accepted; -1 if it was not asked
    num_steps  int64 [buckets, drafters]  such steps so far
    moves  float64 [buckets, NUM_LENGTH_BUCKETS]  steps that led from each bucket to which
    gained float64 [buckets]  tokens that these accepted, without those that asking cost
    later  float64 [buckets]  tokens that the steps behind one that leads to this bucket gain more
           than those behind one in which nothing was accepted
    taken  float64 [buckets, drafters, 2]  seconds of a message and of a query, in steps that asked
           the drafter: how much is drafted, and so how long it takes, depends on the text
    num_nodes  float64 [2]  nodes that are verified for each accepted token, greedy and sampled
    """

    kept: Float32
    num_steps: Int64
    moves: Float64
    gained: Float64
    later: Float64
    taken: Float64
    num_nodes: Float64

    @classmethod
    def none(cls, num_buckets: int, num_drafters: int) -> AcceptedLengths:
        """Nothing is known."""
        shape = (num_buckets, num_drafters, NUM_KEPT, num_drafters)
        count = np.zeros((num_buckets, num_drafters), dtype=np.int64)
        moves = np.zeros((num_buckets, NUM_LENGTH_BUCKETS))
        moves[:, 0] = PRIOR_STEPS
        return cls(
            np.full(shape, -1.0, dtype=np.float32), count, moves,
            np.zeros(num_buckets), np.zeros(num_buckets),
            np.zeros((num_buckets, num_drafters, 2)), np.ones(2),
        )  # fmt: skip

    def with_room(self, num_drafters: int) -> AcceptedLengths:
        """The same with more drafters, the known ones first."""
        num_buckets, known = self.num_steps.shape
        wider = AcceptedLengths.none(num_buckets, num_drafters)
        wider.kept[:, :known, :, :known] = self.kept
        wider.num_steps[:, :known] = self.num_steps
        wider.taken[:, :known] = self.taken
        return wider._replace(
            moves=self.moves, gained=self.gained, later=self.later, num_nodes=self.num_nodes
        )

    def value_buckets(self) -> None:
        """Set `later` by what was recorded: `later = gained + discount * shares @ later`, less the
        same of the bucket without accepted tokens."""
        for first in range(0, len(self.later), NUM_LENGTH_BUCKETS):
            own = slice(first, first + NUM_LENGTH_BUCKETS)
            counts = self.moves[own].sum(axis=1)
            shares, gained = self.moves[own] / counts[:, None], self.gained[own] / counts
            moved = LATER_DISCOUNT * (shares[1:, 1:] - shares[0, 1:])
            later = np.linalg.solve(np.eye(len(moved)) - moved, gained[1:] - gained[0])
            # By chance alone would a longer one be worth less.
            self.later[first + 1 : own.stop] = np.maximum.accumulate(np.maximum(later, 0.0))


class AskedStep(NamedTuple):
    """What a step brought, by request.

    buckets   int64 [requests]  -1: nothing is learned of it
    asked     int64 [requests]  bits of drafters
    lengths   int64 [requests, drafters]  as of `accepted_of`
    accepted  int64 [requests]  draft tokens
    sizes     int64 [requests]  nodes of its tree
    is_like_others  bool [requests]  whether it tells where steps lead: one that accepts nothing
              stays in its bucket for reasons of its own
    """

    buckets: Int64
    asked: Int64
    lengths: Int64
    accepted: Int64
    sizes: Int64
    is_like_others: Bool


class SetPrices(NamedTuple):
    """What asking a set of drafters takes for one request; seconds.

    drafters  float64 [drafters]  of asking each
    host_s    of the engine's own work for drafts, and the extra time of a one-token step
    plain_s   of a token in plain decoding
    node_s    of the nodes that are verified for each accepted token
    """

    drafters: Float64
    host_s: float
    plain_s: float
    node_s: float


@compiled
def accepted_of(
    nodes: Int32,
    values: Float64,
    attributions: Int32,
    log_probs: Float32,
    ends: Int64,
    rows: Int32,
    row_ends: Int64,
    counts: Float64,
) -> tuple[Int64, Float64]:
    """int64 [trees, drafters]: the depth of each drafter's deepest accepted node, as far as the
    drafter alone would have had it verified (`SOLD_SHARE`); float64 [trees]: how many nodes were
    expected to be accepted.

    nodes .. ends   as of `TreeBatch`
    rows, row_ends  of each tree's accepted path, the root's first; node i is row i + 1
    counts          of the `AcceptanceTable`
    """
    num_trees, num_drafters = ends.shape[1], len(counts)
    found = np.zeros((num_trees, num_drafters), dtype=np.int64)
    expected = np.zeros(num_trees)
    least = values.min() if len(values) else 1.0
    first, first_said, first_row = 0, 0, 0
    for tree in range(num_trees):
        length = row_ends[tree] - first_row
        expected[tree] = values[first : ends[0, tree]].sum()
        # The probability of each accepted node given its parent, by each drafter's estimates.
        edges = np.zeros((num_drafters, max(length, 1)))
        for place in range(first_said, ends[1, tree]):
            node, drafter = attributions[place, NODE], attributions[place, DRAFTER]
            depth = nodes[first + node, DEPTH]
            if depth < length and rows[first_row + depth] == node + 1:
                rank, drafted_depth = attributions[place, RANK], attributions[place, DRAFTED_DEPTH]
                edge = estimate(counts, drafter, log_probs[place], drafted_depth, rank)
                edges[drafter, depth] = max(edges[drafter, depth], edge)
        for drafter in range(num_drafters):
            value = 1.0
            for depth in range(1, length):
                value *= edges[drafter, depth]
                if value < SOLD_SHARE * least:
                    break
                found[tree, drafter] = depth
        first, first_said, first_row = ends[0, tree], ends[1, tree], row_ends[tree]
    return found, expected


@compiled
def record_lengths(
    known: AcceptedLengths, newest: AskedStep, seconds: Float64, host_s: float, token_s: float
) -> None:
    """Keep a step of several requests.

    seconds  float64 [drafters, 3]  of a message to each drafter, a query in it, opening a token
    host_s   of the engine's own work for drafts, for each request
    token_s  what a token saves
    """
    buckets, lengths = newest.buckets, newest.lengths
    num_drafters, num_requests = known.num_steps.shape[1], len(buckets)
    costs = (seconds[:, 0] / num_requests + seconds[:, 1]) / token_s
    # Drafters that were asked, by bucket; nodes and tokens of greedy and sampled requests.
    who = np.zeros(len(known.later), dtype=np.int64)
    counts = np.zeros((2, 2))
    for request in range(num_requests):
        bucket, bits = buckets[request], newest.asked[request]
        if bucket < 0:
            continue
        who[bucket] |= bits
        if bits:
            kind = bucket // NUM_LENGTH_BUCKETS
            counts[kind, 0] += newest.sizes[request]
            counts[kind, 1] += lengths[request].max()
        if newest.is_like_others[request]:
            num_accepted = newest.accepted[request]
            known.moves[bucket] *= MOVE_DECAY
            known.moves[bucket, _length_bucket(num_accepted)] += 1.0
            gained = num_accepted - (host_s / token_s if bits else 0.0)
            for drafter in range(num_drafters):
                gained -= costs[drafter] * (bits >> drafter & 1)
            known.gained[bucket] = MOVE_DECAY * known.gained[bucket] + gained
        for drafter in range(num_drafters):
            if not bits >> drafter & 1:
                continue
            step = known.kept[bucket, drafter, known.num_steps[bucket, drafter] % NUM_KEPT]
            known.num_steps[bucket, drafter] += 1
            for other in range(num_drafters):
                step[other] = lengths[request, other] if bits >> other & 1 else -1
    for bucket, bits in enumerate(who):
        for drafter in range(num_drafters):
            if bits >> drafter & 1:
                taken = known.taken[bucket, drafter]
                for part in range(2):
                    weight = TAKEN_WEIGHT if taken[part] > 0 else 1.0
                    taken[part] += weight * (seconds[drafter, part] - taken[part])
    for kind in range(2):
        num_nodes, tokens = counts[kind]
        if tokens:
            weight = min(NODE_WEIGHT * tokens, MOST_NODE_WEIGHT)
            known.num_nodes[kind] += weight * (num_nodes / tokens - known.num_nodes[kind])


@compiled
def margin(
    known: AcceptedLengths, bucket: int, drafter: int, others: int, later_share: float
) -> float:
    """Tokens that a drafter adds to those of `others`, bits, in a step where all of them are asked,
    and this share of those that it adds to later steps."""
    total, count = 0.0, 0
    for place in range(min(known.num_steps[bucket, drafter], NUM_KEPT)):
        step, most, is_known = known.kept[bucket, drafter, place], np.float32(0.0), True
        for other in range(len(step)):
            if others >> other & 1:
                is_known &= step[other] >= 0
                most = max(most, step[other])
        if is_known:
            if step[drafter] > most:
                later = _later(known, bucket, step[drafter]) - _later(known, bucket, float(most))
                total += step[drafter] - most + later_share * later
            count += 1
    return total / (count + PRIOR_STEPS)


@compiled
def _later(known: AcceptedLengths, bucket: int, length: float) -> float:
    """Tokens that the steps behind one of this accepted length bring more."""
    return float(known.later[bucket - bucket % NUM_LENGTH_BUCKETS + _length_bucket(length)])


@compiled
def _length_bucket(num_accepted: float) -> int:
    """As `length_bucket_of`."""
    found = 0
    for most in BUCKET_LENGTHS:
        found += num_accepted > most
    return found


@compiled
def best_set(
    known: AcceptedLengths, bucket: int, prices: SetPrices, allowed: int, ratio: float
) -> int:
    """Bits of the drafters that make most tokens a second; 0 where plain decoding does.

    The search adds or drops one drafter at a time, from none and from all that are `allowed`.

    ratio  tokens that the request accepts, over those of others
    """
    found, best, order = 0, 1.0 / prices.plain_s, np.argsort(prices.drafters)
    for start in (0, allowed):
        chosen, rate = start, _rate(known, bucket, start, prices, order, ratio)
        while True:
            other, other_rate = chosen, rate
            for drafter in order:
                if allowed >> drafter & 1:
                    changed = chosen ^ (1 << drafter)
                    changed_rate = _rate(known, bucket, changed, prices, order, ratio)
                    if changed_rate > other_rate:
                        other, other_rate = changed, changed_rate
            if other == chosen:
                break
            chosen, rate = other, other_rate
        if rate > best:
            found, best = chosen, rate
    return found


@compiled
def _rate(
    known: AcceptedLengths,
    bucket: int,
    drafters: int,
    prices: SetPrices,
    order: Int64,
    ratio: float,
) -> float:
    """Tokens a second of a request for which a set of drafters, bits, is asked.

    Each counts for what it adds to the cheaper ones of the set, which come first in `order`.
    """
    if not drafters:
        return 1.0 / prices.plain_s
    seconds, gain, before = prices.plain_s + prices.host_s, 0.0, 0
    for drafter in order:
        if drafters >> drafter & 1:
            # The later tokens are of the same request.
            gain += ratio * margin(known, bucket, drafter, before, ratio)
            seconds += prices.drafters[drafter]
            before |= 1 << drafter
    return float((1.0 + gain) / (seconds + prices.node_s * gain))
