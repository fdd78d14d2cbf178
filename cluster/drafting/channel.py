"""The hub's end of one drafter: what is on its way, what arrived and waits, whether it is well."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.errors import DrafterError
from ...core.proposals import (
    MAX_ASSUMED_TOKENS,
    DraftCost,
    Drafted,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
)
from ..links.failures import CircuitBreaker, FailureLog, RetryPolicy, failure_reason
from ..links.link import DrafterLink, DrafterMessage, DrafterReport, DraftSeconds
from .arrived import AnswerCheck, ArrivedProposals
from .backlog import CommittedText, DrafterBacklog
from .drafter_cost import AnswerTimes, CostMeter
from .stats import DrafterStats

logger = logging.getLogger(__name__)

# Every so many messages with queries a drafter that seemed too slow is waited for again.
PATIENCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLimits:
    """What one drafter may do before it counts as failed.

    vocab_size        token ids stay below
    answer_timeout_s  a message unanswered for so long counts as a failure
    max_backlog       ended requests and their last commits kept for a drafter that learns from them
    max_probe_rows    most rows, offset and top_k of a probe
    """

    vocab_size: int
    answer_timeout_s: float = 2.0
    max_backlog: int = 1024
    max_probe_rows: int = 256
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class DrafterChannel:
    """One drafter's messages, answers and health. Implements the link's `LinkEvents`.

    At most one message is on its way; what happens meanwhile goes with the next one, which leaves
    as soon as the answer is in. Nothing that the drafter does raises out of here.

    texts        all open requests; the owner keeps it up to date before it calls
    on_progress  called after every event of a drafter that is not local
    on_answer    called with what each answer took, seconds, and for how many requests it has drafts
    """

    def __init__(  # noqa: PLR0913 - one parameter a part
        self,
        link: DrafterLink,
        texts: Mapping[str, CommittedText],
        limits: DrafterLimits,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_progress: Callable[[], None],
        on_answer: Callable[[float, int], None] | None = None,
    ) -> None:
        self.link = link
        self.is_up = False
        self.is_connecting = False
        self.is_awaited = False
        self.is_draining = False
        self.num_others, self.told_at = 0, -math.inf
        self.times = AnswerTimes()
        self._texts = texts
        self._limits = limits
        self._clock = clock
        self._on_progress = on_progress
        self._on_answer = on_answer
        self._backlog = DrafterBacklog(
            link.name, limits.max_backlog, keeps_answers=link.keeps_answers
        )
        self._meter = CostMeter(is_ahead=link.ahead is not None)
        self._failures = FailureLog(logger, f"drafter={link.name}", clock=clock)
        self._breaker = CircuitBreaker(limits.retry, rng)
        self._arrived = ArrivedProposals()
        self._check = AnswerCheck(limits.vocab_size, limits.max_probe_rows)
        self._message: DrafterMessage | None = None
        self._message_texts: list[CommittedText] = []
        self._sent_at = 0.0
        self._queries: Sequence[Query] = ()
        self._budget_s = 0.0
        self._num_messages = self._num_asked = self._num_errors = self._num_connects = 0
        self._seconds = DraftSeconds()
        self._report = DrafterReport()

    def cost(self) -> DraftCost:
        """What it takes of the engine's time."""
        return self._meter.cost()

    @property
    def is_behind(self) -> bool:
        """Whether a message of an earlier step is on its way still."""
        return self._message is not None and not self.is_awaited

    def silent_s(self) -> float:
        """For how long a message that opens nothing owes drafts that are wanted now."""
        message = self._message
        if message is None or message.opens or not message.queries:
            return 0.0
        return self._clock() - self._sent_at

    def open(self, request_id: str) -> None:
        """Tell of a request in `texts` before the drafter is asked for it."""
        if self.is_up:
            self._backlog.open(request_id)
            self._flush_soon()

    def close(self, request_id: str, text: CommittedText) -> None:
        """A request left `texts`; this was its text."""
        self._arrived.forget(request_id)
        # The id may be opened again, with another text, before these leave.
        self._queries = [query for query in self._queries if query.request_id != request_id]
        if self.link.ahead is not None:
            self.link.ahead.close(request_id)
        if self.is_up:
            self._backlog.close(request_id, text)
            if self._backlog:
                self._flush_soon()

    def observe(self, commits: Sequence[StepCommit]) -> None:
        """Keep what the drafter wished to know of commits that `texts` has already."""
        if self.is_up:
            self._backlog.commit(commits)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next message that asks for their requests."""
        if self.is_up:
            self._backlog.note_features(rows)

    def note_drafted(self, drafted: Drafted) -> None:
        """Keep what a head of the last stage drafted, until it is asked for."""
        assert self.link.ahead is not None
        if drafted.proposals:
            count, num_levels = len(drafted.proposals), drafted.num_levels
            self._meter.record((), count, drafted.seconds, None, num_levels)
            self._seconds += DraftSeconds(propose_s=drafted.seconds)
        for request_id, length, proposal in drafted.proposals:
            if request_id in self._texts:
                self.link.ahead.take(request_id, length, proposal)

    def queue(self, queries: Sequence[Query], budget_s: float) -> bool:
        """Keep the queries of a step for the next message; they replace those of earlier steps.

        Whether there are any.
        """
        queries = [query for query in queries if len(query.assumed or ()) <= self._longest_path]
        self._queries, self._budget_s = queries, budget_s
        self.is_awaited = False
        return bool(queries)

    def send(self) -> None:
        """Send what is queued, now or when the drafter has answered or is connected again.

        Sets `is_awaited` where an answer can be expected within the budget.
        """
        now = self._clock()
        if not self.is_up:
            self.connect(now)
        elif self._message is not None and now - self._sent_at > self._limits.answer_timeout_s:
            self.link.unanswered()
            self.failed(DrafterError("no answer in time"))
        self._flush()
        if self._queries and self._message is not None and not self._message.queries:
            # Openings are answered quickly, and the queries leave then.
            self.is_awaited = self._is_in_time()

    def take(self, query: Query) -> Proposal | None:
        """The newest proposal that fits the query's text and path, or None."""
        is_asked = len(query.assumed or ()) <= self._longest_path
        return self._arrived.take(query) if is_asked else None

    @property
    def _longest_path(self) -> int:
        """Most tokens behind a text that it is asked to go on from: heads of the last stage have
        drafted behind the text alone."""
        return MAX_ASSUMED_TOKENS if self.link.ahead is None else 0

    def connect(self, now: float) -> None:
        """Begin to connect, unless the breaker is open."""
        if not (self.is_up or self.is_connecting) and now >= self._breaker.retry_at:
            self.is_connecting = True
            self.link.connect(self)

    def ready(self) -> None:
        """The drafter knows nothing: open every request with it."""
        self._num_connects += 1
        self.is_connecting = self.is_draining = False
        self.is_up = True
        self.times.num_overdue = 0
        self._backlog.reset()
        self._flush_soon()
        if not self.link.is_local:
            logger.info("drafter=%s event=connected count=%d", self.link.name, self._num_connects)
            self._on_progress()

    def told(self, num_others: int, *, is_draining: bool) -> None:
        """What its server says of itself: see `PooledChannel`."""
        self.num_others, self.is_draining = num_others, is_draining
        self.told_at = self._clock()

    def answered(
        self,
        proposals: Sequence[Proposal],
        report: DrafterReport | None = None,
        seconds: DraftSeconds | None = None,
    ) -> None:
        """Keep what passes the border, then send what is queued."""
        message, self._message = self._message, None
        assert message is not None, "an answer to nothing"
        try:
            self._check(proposals, len(message.queries), self.link.name)
        except Exception as error:
            # An in-process drafter may return anything, and its use then raise anything.
            logger.debug("drafter=%s event=bad_answer", self.link.name, exc_info=True)
            self.failed(DrafterError(f"bad answer: {failure_reason(error)}"))
            return
        self._breaker.succeed()
        self._report = report or self._report
        if seconds is not None:
            self._seconds += seconds
        self._record_cost(message, seconds)
        if self._on_answer is not None:
            self._on_answer(self._clock() - self._sent_at, len(message.queries))
        if message.queries:
            now = self._clock()
            late, opened = now > message.deadline, bool(message.opens)
            self.times.record(now - self._sent_at, is_overdue=late, opened=opened)
            self.is_awaited = False
            self._keep(message, proposals)
        if not self.link.is_local:
            self._flush()
            self._on_progress()

    def _keep(self, message: DrafterMessage, proposals: Sequence[Proposal]) -> None:
        asked = zip(message.queries, self._message_texts, strict=True)
        for place, (query, text) in enumerate(asked):
            if self._texts.get(query.request_id) is text:
                self._arrived.put(query, text, proposals, place)

    def failed(self, error: DrafterError) -> None:
        """Disconnect; the breaker says when to try again."""
        self._num_errors += 1
        self.is_up = self.is_awaited = self.is_connecting = False
        self._message = None
        self.link.disconnect()
        delay = self._breaker.fail(self._clock())
        self._failures.log("failed", f"retry_in_s={delay:.2f} {error}")
        self._on_progress()

    def retire(self) -> None:
        """Disconnect, so that the drafter forgets all requests; it is not asked any more."""
        self.is_up = self.is_awaited = self.is_connecting = False
        self._message, self._queries = None, ()
        self._backlog.reset()
        self.link.disconnect()
        if self.link.ahead is not None:
            for request_id in self._texts:
                self.link.ahead.close(request_id)

    async def stop(self) -> None:
        """Disconnect for good; what waits is not told any more."""
        self.is_up = self.is_awaited = self.is_connecting = False
        await self.link.close()

    def stats(self) -> DrafterStats:
        """Totals so far."""
        learning = self.link.learning_counts
        return DrafterStats(
            name=self.link.name,
            connected=self.is_up,
            servers=int(self.is_up and not self.is_draining),
            circuit_open=not self.is_up and self._clock() < self._breaker.retry_at,
            messages=self._num_messages,
            **self._arrived.counts(),
            errors=self._num_errors,
            reconnects=max(0, self._num_connects - 1),
            latency_sum_s=self.times.sum_s,
            latency_count=self.times.count,
            open_s=self._seconds.open_s,
            observe_s=self._seconds.observe_s,
            propose_s=self._seconds.propose_s,
            memory_bytes=self._report.memory_bytes,
            learning=self._report.learning if learning is None else learning,
            prefix=self._report.prefix,
        )

    def _flush_soon(self) -> None:
        # Deferred, so that it can still join a step's message. In process that step comes anyway,
        # but after the last request: what a drafter learns of it must not wait for the next one.
        if not (self.link.is_local and self._texts):
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what is queued, if it may be sent now."""
        if not self.is_up or self._message is not None:
            return
        texts = self._texts
        queries = self._current(self._queries)
        self._queries = ()
        if not queries and not self._backlog:
            return
        self._sent_at = now = self._clock()
        self._num_messages += 1
        self._num_asked += bool(queries)
        asked = [query.request_id for query in queries]
        closes, opens, commits, last = self._backlog.take(texts, asked)
        message = DrafterMessage(
            self._num_messages, closes, opens, commits, queries, now + self._budget_s, last,
            self._backlog.take_features(asked),
        )  # fmt: skip
        self._message = message
        self._message_texts = [texts[request_id] for request_id in asked]
        self.is_awaited = bool(queries) and self._is_in_time()
        self.link.send(message)

    def _is_in_time(self) -> bool:
        """Whether to wait for it: proposals of one slower than the budget are used re-rooted."""
        return self.times.mean_s <= self._budget_s or self._num_asked % PATIENCE == 0

    def _current(self, queries: Sequence[Query]) -> list[Query]:
        # Of a text that has grown since, none is of use: the drafter is told of all its tokens.
        most, texts = self.link.max_nodes, self._texts
        return [
            query if query.max_nodes <= most else query._replace(max_nodes=most)
            for query in queries
            if (text := texts.get(query.request_id)) and text.length == query.committed_len
        ]

    def _record_cost(self, message: DrafterMessage, seconds: DraftSeconds | None) -> None:
        # Heads of the last stage draft in its time.
        if self.link.ahead is None:
            took_s = self._clock() - self._sent_at
            self._meter.record(message.opens, len(message.queries), took_s, seconds)
