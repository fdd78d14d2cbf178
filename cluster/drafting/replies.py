"""What a drafter's replies must be, what they cost, and what is counted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.errors import ProtocolError
from ...core.interfaces import PrefixCounts
from ...core.proposals import DraftCost, DraftRequest, Probe, Proposal
from ...core.speculation.step_cost import LineFit
from ...core.tree.proposal_batch import ProposalBatch
from ..links.failures import RetryPolicy

# What a new answer leaves of the weight of those before it.
DECAY = 0.9
# Squares of numbers of queries that the guess counts for: half of a message is for its queries.
PRIOR_SQUARES = 4.0
# An answer that took so many times longer than the mean tells of the machine, not of the drafter.
OUTLIER = 4.0
# Opening a token never takes longer than a query. The first message of all may have waited for
# anything: until one without openings was seen, no more than this is believed.
FIRST_OPEN_TOKEN_S = 1e-4
# No more is believed of the first answer, either, which is not learned from: who is taken for dear
# is hardly asked again.
FIRST_ANSWER_S = 5e-3
# Weight of the newest openings, and of such as took less: the first ones load what all need.
OPEN_WEIGHT, FASTER_WEIGHT = 0.2, 0.5
# Weight of the newest answer in the running mean of latency.
LATENCY_WEIGHT = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLimits:
    """Limits of every drafter.

    vocab_size        token ids stay below
    answer_timeout_s  in another process: a message unanswered for so long counts as a failure
    max_backlog       in another process: ended requests and their last commits that wait for a
                      drafter that learns from them
    max_probe_rows    most rows, offset and top_k of a probe
    retry             when one that failed is asked again
    """

    vocab_size: int
    answer_timeout_s: float = 2.0
    max_backlog: int = 1024
    max_probe_rows: int = 256
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def check(self, proposals: Sequence[Proposal], num_queries: int, source: str) -> None:
        """Raise `ProtocolError` unless these answer so many queries to `source`.

        What is no proposal at all may raise anything.
        """
        if len(proposals) != num_queries:
            raise ProtocolError(f"{len(proposals)} proposals for {num_queries} queries")
        if isinstance(proposals, ProposalBatch):
            if proposals.source != source:
                raise ProtocolError(f"proposals of {proposals.source!r}")
            proposals.check(self.vocab_size)
            for probe in proposals.probes:
                self._check_probe(probe)
            return
        for proposal in proposals:
            if proposal.source != source:
                raise ProtocolError(f"a proposal of {proposal.source!r}")
            proposal.check(self.vocab_size)
            self._check_probe(proposal.probe)

    def _check_probe(self, probe: Probe | None) -> None:
        if probe is not None:
            probe.check(self.vocab_size, self.max_probe_rows)


class CostMeter:
    """Running means of one drafter's `DraftCost`.

    A message costs a constant and a share for each query; both come from a line fitted to the
    measurements. The excess of a message with openings is the cost of the openings, since a model
    reads prompts with its first query.
    """

    __slots__ = ("_cost", "_first_s", "_is_ahead", "_levels", "_line", "_open_token_s")

    def __init__(self, *, is_ahead: bool = False) -> None:
        """`is_ahead`: as of `DraftCost`."""
        self._is_ahead = is_ahead
        self._line = LineFit(DECAY)
        self._levels = LineFit(DECAY)
        self._first_s = 0.0
        self._open_token_s = 0.0
        self._cost = self._means()

    def cost(self) -> DraftCost:
        """The means now."""
        return self._cost

    def _means(self) -> DraftCost:
        if not self._line.weight:
            open_token_s = min(self._open_token_s, FIRST_OPEN_TOKEN_S)
            return DraftCost(self._first_s, 0.0, open_token_s, is_ahead=self._is_ahead)
        message_s, query_s = self._line.parts(PRIOR_SQUARES)
        open_token_s = min(self._open_token_s, query_s)
        level_s = self._level_s()
        return DraftCost(message_s, query_s, open_token_s, is_ahead=self._is_ahead, level_s=level_s)

    def _level_s(self) -> float:
        levels = self._levels
        # The pass that reads a text drafts its first level.
        return levels.slope(levels.mean_y / max(levels.mean_x, 1.0), PRIOR_SQUARES)

    def record(
        self,
        opened: Sequence[DraftRequest],
        num_queries: int,
        seconds: float,
        open_s: float = 0.0,
        num_levels: int = 0,
    ) -> None:
        """Learn from an answer to a message that opened requests, or asked something.

        seconds  that the engine waited for it, or worked at it
        open_s   of these, seconds for the openings at least, as the drafter itself measured them
        num_levels  of its trees that took a pass each, where it counts them
        """
        cost = self._cost
        if opened:
            usual = cost.seconds(num_queries)
            extra = max(seconds - usual, open_s)
            a_token = extra / max(sum(len(request.token_ids) for request in opened), 1)
            weight = FASTER_WEIGHT if a_token < self._open_token_s else OPEN_WEIGHT
            weight = weight if self._open_token_s else 1.0
            self._open_token_s += weight * (a_token - self._open_token_s)
        elif num_queries and not self._first_s:
            self._first_s = min(seconds, FIRST_ANSWER_S)
        elif num_queries:
            if self._line.weight:
                seconds = min(seconds, OUTLIER * cost.seconds(num_queries))
            self._line.record(num_queries, seconds)
            if num_levels:
                self._levels.record(num_levels, seconds)
        self._cost = self._means()


@dataclass(slots=True)
class AnswerTimes:
    """How long answers to queries take, and whether they are in time.

    mean_s       running mean, seconds; 0 before the first; one that took less counts at once
    num_overdue  in a row after their deadlines
    sum_s, count  of all
    """

    mean_s: float = 0.0
    num_overdue: int = 0
    sum_s: float = 0.0
    count: int = 0

    def record(self, took_s: float, *, is_overdue: bool, opened: bool) -> None:
        """Learn from an answer; `opened`: its message had openings, too.

        Prompts are long: what an answer takes with one says nothing about the next.
        """
        self.sum_s += took_s
        self.count += 1
        if not opened:
            self.num_overdue = self.num_overdue + 1 if is_overdue else 0
            self.mean_s += LATENCY_WEIGHT * (took_s - self.mean_s)
            self.mean_s = min(self.mean_s, took_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStats:
    """Totals since start, for metrics.

    connected      whether messages can be sent now
    servers        that requests may go to now: 0 or 1, or more of a pool
    circuit_open   whether it failed and is not tried again before its delay is over
    left_out       it is a head whose drafts are never right: it is not asked any more
    messages       sent
    proposals      used: given out by the hub, late ones included
    late           came after their step's deadline
    late_used      of these, how many still fitted the text
    dropped        late ones that fit the text no more, or were replaced by a newer one
    errors         failures of any kind: raised, broke the contract, never answered, lost
    reconnects     connections after the first
    memory_bytes   what it takes now for requests and learned texts; 0 before its first report
    learning       ended requests by outcome, see `core.interfaces.LearningDrafter`; empty where it
                   learns nothing, or before its first report
    prefix         how much of new texts the cache of a model had already, in tokens
    moved          openings of a request at another server of the pool, since its own was lost, slow
                   or about to stop
    latency_sum_s  from message to answer, over the `latency_count` answers to queries
    open_s, observe_s, propose_s  seconds that the drafter itself worked, by kind of call
    """

    name: str
    connected: bool
    servers: int = 0
    circuit_open: bool
    messages: int
    proposals: int
    late: int = 0
    late_used: int = 0
    dropped: int = 0
    errors: int
    reconnects: int
    latency_sum_s: float
    latency_count: int
    open_s: float = 0.0
    observe_s: float = 0.0
    propose_s: float = 0.0
    left_out: bool = False
    memory_bytes: int = 0
    learning: Mapping[str, int] = field(default_factory=dict)
    prefix: PrefixCounts = field(default_factory=PrefixCounts)
    moved: int = 0
