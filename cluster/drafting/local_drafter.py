"""A drafter of this process: its methods are called directly."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...core.interfaces import (
    AheadDrafter,
    CachingDrafter,
    Drafter,
    FeatureDrafter,
    LearningDrafter,
    OwningDrafter,
    PrefixCounts,
)
from ...core.proposals import (
    MAX_ASSUMED_TOKENS,
    Commit,
    DraftCost,
    Drafted,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
    empty_proposal,
)
from ...core.step.trace import StepTrace
from ...core.tree.merge import cut
from ..links.failures import CircuitBreaker, FailureLog, failure_reason
from ..links.features import feature_columns
from ..links.link import MAX_NODES, REPORT_EVERY
from .committed_text import CommittedText, UnsentCommits, at_most, is_current
from .replies import CostMeter, DrafterLimits, DrafterStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LocalDrafter:
    """A drafter of this process, and how it is used.

    max_nodes      most nodes that it is asked for, for one request and step
    keeps_answers  whether it learns from requests that end, also where it was never asked for them
    features       the hidden states that the target returns, for a drafter that reads some of them;
                   by default exactly those
    """

    drafter: Drafter
    max_nodes: int = MAX_NODES
    keeps_answers: bool = True
    features: FeatureLayers | None = None


class LocalClient:
    """Asks a drafter of this process, and measures it.

    A drafter that raises or returns invalid proposals is skipped until its circuit breaker allows
    another try; it then receives its requests again. Its errors never raise here.

    texts  all open requests; the owner keeps it up to date before it calls
    trace  has a row for it, unless it is a head of the last stage: those have the stage's
    """

    def __init__(
        self,
        local: LocalDrafter,
        texts: Mapping[str, CommittedText],
        limits: DrafterLimits,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        trace: StepTrace | None = None,
    ) -> None:
        drafter = self._drafter = local.drafter
        self.name = drafter.name
        # A head of the last stage has drafted before it is asked.
        self._ahead = drafter if isinstance(drafter, AheadDrafter) else None
        self._reader = drafter if isinstance(drafter, FeatureDrafter) else None
        if self._reader is not None:
            read = self._reader.feature_layers
            self._columns = feature_columns(local.features or read, read)
        self._max_nodes = local.max_nodes
        self._keeps_answers = local.keeps_answers
        self._texts = texts
        self._limits = limits
        self._clock = clock
        self._on_answer = None
        if trace is not None and self._ahead is None:
            self._on_answer = trace.drafter(self.name)
        self._longest_path = MAX_ASSUMED_TOKENS if self._ahead is None else 0
        self._unsent = UnsentCommits(self.name)
        self._meter = CostMeter(is_ahead=self.is_ahead)
        self._failures = FailureLog(logger, f"drafter={self.name}", clock=clock)
        self._breaker = CircuitBreaker(limits.retry, rng)
        self._is_retired = self._has_failed = False
        self._num_asked = self._num_answers = self._num_used = 0
        self._num_errors = self._num_returns = 0
        # Totals, of answers and of the drafter's own work.
        self._answer_s = self._open_s = self._observe_s = self._propose_s = 0.0
        self._memory_bytes = 0
        self._prefix = PrefixCounts()

    @property
    def is_ahead(self) -> bool:
        """Whether it stands for a head of the last stage."""
        return self._ahead is not None

    @property
    def reads_features(self) -> bool:
        """Whether it goes on from the target's features."""
        return self._reader is not None

    def cost(self) -> DraftCost:
        """What it takes of the engine's time."""
        return self._meter.cost()

    def observe(self, commits: Sequence[StepCommit]) -> None:
        """Keep what the drafter wished to know of commits that `texts` has already."""
        self._unsent.note_commits(commits)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features until the drafter is asked for their requests."""
        self._unsent.note_features(rows)

    def note_drafted(self, drafted: Drafted) -> None:
        """Keep what a head of the last stage drafted, until it is asked for."""
        assert self._ahead is not None
        if drafted.proposals:
            count, num_levels = len(drafted.proposals), drafted.num_levels
            self._meter.record((), count, drafted.seconds, num_levels=num_levels)
            self._propose_s += drafted.seconds
        for request_id, length, proposal in drafted.proposals:
            if request_id in self._texts:
                self._ahead.take(request_id, length, proposal)

    def ask(self, queries: Sequence[Query], budget_s: float) -> list[tuple[str, Proposal]]:
        """What the drafter proposes, by request id; nothing where it has nothing to say.

        The drafter first receives the commits that it missed of these requests. Queries about texts
        that have grown since are left out.
        """
        start = self._clock()
        queries = [query for query in queries if self._is_of_use(query)]
        if not queries or not self._is_up(start):
            return []
        self._num_asked += 1
        self._num_returns += self._has_failed
        self._has_failed = False
        try:
            proposals, opened, open_s = self._draft(queries, start + budget_s)
        except Exception as error:
            logger.debug("drafter=%s event=raised", self.name, exc_info=True)
            self._fail(f"it raised {failure_reason(error)}")
            return []
        try:
            self._limits.check(proposals, len(queries), self.name)
            given = [
                (query.request_id, cut(proposal, query.max_nodes))
                for query, proposal in zip(queries, proposals, strict=True)
                if not proposal.is_empty
            ]
        except Exception as error:
            # It may return anything, and the use of that then raise anything.
            logger.debug("drafter=%s event=bad_answer", self.name, exc_info=True)
            self._fail(f"bad answer: {failure_reason(error)}")
            return []
        self._breaker.succeed()
        self._num_answers += 1
        took_s = self._clock() - start
        self._answer_s += took_s
        # Heads of the last stage draft in its time.
        if self._ahead is None:
            self._meter.record(opened, len(queries), took_s, open_s)
        if self._on_answer is not None:
            self._on_answer(took_s, len(queries))
        self._num_used += len(given)
        return given

    def _draft(
        self, queries: Sequence[Query], deadline: float
    ) -> tuple[Sequence[Proposal], Sequence[DraftRequest], float]:
        """The drafter's answer, the requests that were opened for it, and seconds for that.

        Raises what the drafter raises.
        """
        drafter, unsent, clock = self._drafter, self._unsent, self._clock
        opens, commits = [], []
        for query in queries:
            text = self._texts[query.request_id]
            if query.request_id in unsent:
                commits += unsent.take_commits(query.request_id, text)
            else:
                opens.append(text.request())
        begun = clock()
        for request in opens:
            unsent.note_open(request)
            drafter.open(request)
        opened = clock()
        if self._reader is not None:
            features = unsent.take_features([query.request_id for query in queries])
            if features:
                self._reader.observe_features([self._columns.of(rows) for rows in features])
        if commits:
            drafter.observe(commits)
        observed = clock()
        proposals = drafter.propose(at_most(queries, self._max_nodes), deadline)
        proposed = clock()
        if self._num_asked % REPORT_EVERY == 1:
            self._memory_bytes = drafter.memory_bytes
            if isinstance(drafter, CachingDrafter):
                self._prefix = drafter.prefix_counts
        self._open_s += opened - begun
        self._observe_s += observed - opened
        self._propose_s += proposed - observed
        return proposals, opens, opened - begun

    def close(self, request_id: str, text: CommittedText) -> None:
        """A request left `texts`; this was its text."""
        if self._ahead is not None:
            self._ahead.close(request_id)
        start = self._clock()
        is_known = request_id in self._unsent
        if self._is_up(start) and (is_known or self._keeps_answers):
            try:
                self._end(request_id, text, is_known=is_known)
            except Exception as error:
                logger.debug("drafter=%s event=raised", self.name, exc_info=True)
                self._fail(f"it raised {failure_reason(error)}")
            self._open_s += self._clock() - start
        self._unsent.forget(request_id)

    def _end(self, request_id: str, text: CommittedText, *, is_known: bool) -> None:
        """Tell the drafter of an end. Raises what the drafter raises."""
        if not is_known:
            request = text.request()
            self._unsent.note_open(request)
            self._drafter.open(request)
        elif self._keeps_answers and (missed := self._unsent.take_commits(request_id, text)):
            self._drafter.observe(missed)
        self._drafter.close(request_id)

    def retire(self) -> None:
        """Let the drafter forget all requests; it is not asked any more."""
        self._is_retired = True
        self._forget_all()
        if self._ahead is not None:
            for request_id in self._texts:
                self._ahead.close(request_id)

    async def stop(self) -> None:
        """The same, and free what the drafter holds."""
        self.retire()
        if isinstance(self._drafter, OwningDrafter):
            await asyncio.to_thread(self._drafter.free)

    def stats(self) -> DrafterStats:
        """Totals so far."""
        drafter, now = self._drafter, self._clock()
        is_up = self._is_up(now)
        return DrafterStats(
            name=self.name,
            connected=is_up,
            servers=int(is_up),
            circuit_open=now < self._breaker.retry_at,
            messages=self._num_asked,
            proposals=self._num_used,
            errors=self._num_errors,
            reconnects=self._num_returns,
            latency_sum_s=self._answer_s,
            latency_count=self._num_answers,
            open_s=self._open_s,
            observe_s=self._observe_s,
            propose_s=self._propose_s,
            memory_bytes=self._memory_bytes,
            learning=drafter.learning_counts if isinstance(drafter, LearningDrafter) else {},
            prefix=self._prefix,
        )

    def _is_up(self, now: float) -> bool:
        return not self._is_retired and now >= self._breaker.retry_at

    def _is_of_use(self, query: Query) -> bool:
        return len(query.assumed or ()) <= self._longest_path and is_current(query, self._texts)

    def _fail(self, reason: str) -> None:
        """The drafter's state is unknown: close its requests, and try again after a delay."""
        self._num_errors += 1
        self._has_failed = True
        self._forget_all()
        delay = self._breaker.fail(self._clock())
        self._failures.log("failed", f"retry_in_s={delay:.2f} {reason}")

    def _forget_all(self) -> None:
        """Close every request. The drafter's errors are logged."""
        for request_id in self._unsent:
            try:
                self._drafter.close(request_id)
            except Exception as error:
                logger.debug("drafter=%s event=close_raised", self.name, exc_info=True)
                self._failures.log("close_raised", failure_reason(error))
        self._unsent.clear()


class StageDrafts:
    """Keeps the newest draft of each request until it is asked for, or the text went on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._drafts: dict[str, tuple[int, Proposal]] = {}

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def memory_bytes(self) -> int:
        """About the bytes of what is kept here; the head's own are the stage's."""
        return sum(proposal.tokens.nbytes * 3 for _, proposal in list(self._drafts.values()))

    def open(self, request: DraftRequest) -> None:
        """Begin a request. What was drafted behind its prompt is kept."""

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        self._drafts.pop(request_id, None)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Drafts that do not fit the text any more are noticed when they are asked for."""

    def take(self, request_id: str, committed_len: int, proposal: Proposal) -> None:
        """Keep what was drafted behind a request's first `committed_len` tokens."""
        self._drafts[request_id] = committed_len, proposal

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """What was drafted for the text of each query; empty where nothing was."""
        del deadline
        return [self._proposal(query) for query in queries]

    def _proposal(self, query: Query) -> Proposal:
        length, proposal = self._drafts.get(query.request_id, (0, None))
        fits = proposal is not None and length == query.committed_len and not query.assumed
        return proposal if proposal is not None and fits else empty_proposal(self._name)
