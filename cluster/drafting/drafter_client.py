"""The engine's client of a drafter in another process: its messages, its answers, its health.

One message carries the changes since the last one, for all requests. A late answer is used in a
later step if it still fits the text. After a connection is lost, every request is opened again with
all committed tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import DrafterError
from ...core.proposals import (
    MAX_ASSUMED_TOKENS,
    Commit,
    DraftCost,
    DraftRequest,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
)
from ...core.step.trace import StepTrace
from ...core.tree.merge import cut, reroot
from ..links.failures import CircuitBreaker, FailureLog, failure_reason
from ..links.link import DrafterLink, DrafterMessage, DrafterReport, DraftSeconds
from .committed_text import CommittedText, UnsentCommits, at_most, is_current
from .replies import AnswerTimes, CostMeter, DrafterLimits, DrafterStats

logger = logging.getLogger(__name__)

# Every so many messages with queries a drafter that seemed too slow is waited for again.
PATIENCE = 16


class DrafterClient:
    """One drafter's messages, answers and health. Implements the link's `LinkEvents`.

    At most one message is on its way; what happens meanwhile goes with the next one, which leaves
    as soon as the answer is in. Nothing that the drafter does raises out of here.

    texts        all open requests; the owner keeps it up to date before it calls
    on_progress  called after every event
    trace        has a row for it
    """

    def __init__(
        self,
        link: DrafterLink,
        texts: Mapping[str, CommittedText],
        limits: DrafterLimits,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_progress: Callable[[], None],
        trace: StepTrace | None = None,
    ) -> None:
        self.name = link.name
        self.reads_features = link.reads_features
        self.is_up = False
        self.is_connecting = False
        self.is_awaited = False
        self.is_draining = False
        self.num_others, self.told_at = 0, -math.inf
        self.times = AnswerTimes()
        self._link = link
        self._texts = texts
        self._limits = limits
        self._clock = clock
        self._on_progress = on_progress
        self._on_answer = None if trace is None else trace.drafter(link.name)
        self._backlog = _Backlog(link.name, limits.max_backlog, keeps_answers=link.keeps_answers)
        self._meter = CostMeter()
        self._failures = FailureLog(logger, f"drafter={link.name}", clock=clock)
        self._breaker = CircuitBreaker(limits.retry, rng)
        self._arrived = _ArrivedProposals()
        self._message: DrafterMessage | None = None
        self._message_texts: list[CommittedText] = []
        self._sent_at = 0.0
        self._queries: Sequence[Query] = ()
        self._budget_s = 0.0
        self._num_messages = self._num_asked = self._num_errors = self._num_connects = 0
        self._seconds = DraftSeconds()
        self._report = DrafterReport()

    # ---- what the engine says and asks

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
        if self.is_up:
            self._backlog.close(request_id, text)
            if self._backlog:
                self._flush_soon()

    def observe(self, commits: Sequence[StepCommit]) -> None:
        """Keep what the drafter wished to know of commits that `texts` has already."""
        if self.is_up:
            self._backlog.unsent.note_commits(commits)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next message that asks for their requests."""
        if self.is_up:
            self._backlog.unsent.note_features(rows)

    def queue(self, queries: Sequence[Query], budget_s: float) -> bool:
        """Keep the queries of a step for the next message; they replace those of earlier steps.

        Whether there are any.
        """
        queries = [query for query in queries if _is_short(query)]
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
            self._link.unanswered()
            self.failed(DrafterError("no answer in time"))
        self._flush()
        if self._queries and self._message is not None and not self._message.queries:
            # Openings are answered quickly, and the queries leave then.
            self.is_awaited = self._is_in_time()

    def take(self, query: Query) -> Proposal | None:
        """The newest proposal that fits the query's text and path, or None."""
        return self._arrived.take(query) if _is_short(query) else None

    def connect(self, now: float) -> None:
        """Begin to connect, unless the breaker is open."""
        if not (self.is_up or self.is_connecting) and now >= self._breaker.retry_at:
            self.is_connecting = True
            self._link.connect(self)

    def retire(self) -> None:
        """Disconnect, so that the drafter forgets all requests; it is not asked any more."""
        self.is_up = self.is_awaited = self.is_connecting = False
        self._message, self._queries = None, ()
        self._backlog.clear()
        self._link.disconnect()

    async def stop(self) -> None:
        """Disconnect for good; queued messages are dropped."""
        self.is_up = self.is_awaited = self.is_connecting = False
        await self._link.close()

    def stats(self) -> DrafterStats:
        """Totals so far."""
        return DrafterStats(
            name=self.name,
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
            learning=self._report.learning,
            prefix=self._report.prefix,
        )

    # ---- what the link reports

    def ready(self) -> None:
        """The drafter knows nothing: open every request with it."""
        self._num_connects += 1
        self.is_connecting = self.is_draining = False
        self.is_up = True
        self.times.num_overdue = 0
        self._backlog.clear()
        self._flush_soon()
        logger.info("drafter=%s event=connected count=%d", self.name, self._num_connects)
        self._on_progress()

    def server_load(self, num_others: int, *, is_draining: bool) -> None:
        """Keep the load that the server reports; `PoolClient` reads it."""
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
            self._limits.check(proposals, len(message.queries), self.name)
        except Exception as error:
            # What is checked may be anything, and its use then raise anything.
            logger.debug("drafter=%s event=bad_answer", self.name, exc_info=True)
            self.failed(DrafterError(f"bad answer: {failure_reason(error)}"))
            return
        self._breaker.succeed()
        self._report = report or self._report
        if seconds is not None:
            self._seconds += seconds
        now = self._clock()
        took_s = now - self._sent_at
        open_s = 0.0 if seconds is None else seconds.open_s
        self._meter.record(message.opens, len(message.queries), took_s, open_s)
        if self._on_answer is not None:
            self._on_answer(took_s, len(message.queries))
        if message.queries:
            late, opened = now > message.deadline, bool(message.opens)
            self.times.record(took_s, is_overdue=late, opened=opened)
            self.is_awaited = False
            self._keep(message, proposals)
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
        self._link.disconnect()
        delay = self._breaker.fail(self._clock())
        self._failures.log("failed", f"retry_in_s={delay:.2f} {error}")
        self._on_progress()

    # ---- what leaves

    def _flush_soon(self) -> None:
        # Deferred, so that it can still join a step's message.
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what is queued, if it may be sent now."""
        if not self.is_up or self._message is not None:
            return
        # Queries about a text that has grown since are useless: the message has all its tokens.
        queries = [query for query in self._queries if is_current(query, self._texts)]
        self._queries = ()
        if not queries and not self._backlog:
            return
        self._sent_at = now = self._clock()
        self._num_messages += 1
        self._num_asked += bool(queries)
        queries = at_most(queries, self._link.max_nodes)
        self._message_texts = [self._texts[query.request_id] for query in queries]
        message = self._message = self._backlog.message(
            self._num_messages, queries, now + self._budget_s, self._texts
        )
        self.is_awaited = bool(queries) and self._is_in_time()
        self._link.send(message)

    def _is_in_time(self) -> bool:
        """Whether to wait for it: proposals of one slower than the budget are used re-rooted."""
        return self.times.mean_s <= self._budget_s or self._num_asked % PATIENCE == 0


def _is_short(query: Query) -> bool:
    """Whether a message has room for the query's path."""
    return len(query.assumed or ()) <= MAX_ASSUMED_TOKENS


class _Backlog:
    """The contents of the next message to a drafter: openings, ends, and missed commits.

    keeps_answers  whether the drafter learns from ended requests. It then receives their last
                   tokens, and requests that it was never asked for are opened at their end. Beyond
                   `max_ended` waiting ones, all are dropped
    """

    __slots__ = (
        "_closes", "_ended", "_keeps_answers", "_last_commits", "_max_ended", "_opens", "unsent",
    )  # fmt: skip

    def __init__(self, source: str, max_ended: int, *, keeps_answers: bool) -> None:
        self.unsent = UnsentCommits(source)
        self._max_ended = max_ended
        self._keeps_answers = keeps_answers
        self._opens: dict[str, None] = {}
        self._closes: list[str] = []
        self._last_commits: list[Commit] = []
        self._ended: list[DraftRequest] = []

    def __bool__(self) -> bool:
        return bool(self._opens or self._closes or self._ended)

    def clear(self) -> None:
        """The drafter knows nothing any more."""
        self.unsent.clear()
        self._opens = {}
        self._closes = []
        self._last_commits = []
        self._ended = []

    def open(self, request_id: str) -> None:
        """Open a request with the next message, whether it is asked for it or not."""
        if request_id not in self.unsent:
            self._opens[request_id] = None

    def close(self, request_id: str, text: CommittedText) -> None:
        """End a request, whose text is whole now."""
        self._opens.pop(request_id, None)
        if request_id in self.unsent:
            if self._keeps_answers:
                self._last_commits += self.unsent.take_commits(request_id, text)
            self._closes.append(request_id)
        elif self._keeps_answers:
            self._ended.append(text.request())
        self.unsent.forget(request_id)
        if len(self._ended) + len(self._last_commits) > self._max_ended:
            self._ended = []
            self._last_commits = []

    def message(
        self,
        sequence: int,
        queries: Sequence[Query],
        deadline: float,
        texts: Mapping[str, CommittedText],
    ) -> DrafterMessage:
        """All that waits, in a message that leaves now; the requests asked for are in `texts`."""
        unsent = self.unsent
        commits: list[Commit] = []
        asked = [query.request_id for query in queries]
        for request_id in asked:
            if request_id in unsent:
                commits += unsent.take_commits(request_id, texts[request_id])
            else:
                self._opens[request_id] = None
        closes, last = tuple(self._closes), self._last_commits
        opens = [texts[request_id].request() for request_id in self._opens]
        for request in opens:
            unsent.note_open(request)
        # An id that was used again meanwhile is open with its new text; the old text is dropped.
        ended = [request for request in self._ended if request.request_id not in unsent]
        self._opens, self._last_commits, self._ended = {}, [], []
        self._closes = [request.request_id for request in ended]
        features = unsent.take_features(asked)
        return DrafterMessage(
            sequence, closes, (*opens, *ended), commits, queries, deadline, last, features
        )


class _ArrivedProposals:
    """The newest proposal for each open request. Late ones are re-rooted where they still fit.

    An answer stands behind the text and the path that its query assumed. It fits what is asked
    about if that is where it stands, or a place below it, whichever of the tokens up to there are
    committed by now. One that stands below what is asked about waits: the path to it is not the
    drafter's own.
    """

    __slots__ = ("_arrivals", "num_dropped", "num_late", "num_late_used", "num_used")

    def __init__(self) -> None:
        # By request id: the query that was answered, the text it was about, the answers to all
        # queries and the place of its own: of a batch, only what is taken is made an object of.
        self._arrivals: dict[str, tuple[Query, CommittedText, Sequence[Proposal], int]] = {}
        self.num_used = 0
        self.num_late = 0
        self.num_late_used = 0
        self.num_dropped = 0

    def counts(self) -> dict[str, Any]:
        """Totals so far, by their names in `DrafterStats`."""
        return {
            "proposals": self.num_used,
            "late": self.num_late,
            "late_used": self.num_late_used,
            "dropped": self.num_dropped,
        }

    def put(
        self, query: Query, text: CommittedText, proposals: Sequence[Proposal], place: int
    ) -> None:
        """Keep the answer at `place` to a query; it replaces an older one that was not used."""
        if query.request_id in self._arrivals:
            self.num_dropped += 1
        self._arrivals[query.request_id] = (query, text, proposals, place)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._arrivals.pop(request_id, None)

    def take(self, query: Query) -> Proposal | None:
        """The proposal for exactly the query's text and path, at most `max_nodes` long; None if
        none fits.

        The text must reach to the query's committed length.
        """
        arrival = self._arrivals.get(query.request_id)
        if arrival is None:
            return None
        answered, text, proposals, place = arrival
        is_late = not _is_answer(answered, query)
        path = _path_between(answered, text, query) if is_late else []
        if is_late and _is_above(path, answered):
            return None
        del self._arrivals[query.request_id]
        proposal: Proposal | None = proposals[place]
        if is_late:
            self.num_late += 1
            proposal = _below(path, answered, proposal)
            self.num_dropped += proposal is None
        if proposal is None or proposal.is_empty:
            return None
        self.num_used += 1
        self.num_late_used += is_late
        return cut(proposal, query.max_nodes)


def _is_answer(answered: Query, query: Query) -> bool:
    """Whether exactly this was asked."""
    is_same_text = answered.committed_len == query.committed_len
    return is_same_text and (answered.assumed or ()) == (query.assumed or ())


def _path_between(answered: Query, text: CommittedText, query: Query) -> list[int]:
    """Tokens from the text that an earlier query was about to the end of this one's path."""
    path = list(query.assumed or ())
    if answered.committed_len == query.committed_len:
        return path
    return [*text.tokens(answered.committed_len, query.committed_len).tolist(), *path]


def _is_above(path: list[int], answered: Query) -> bool:
    """Whether an answer stands below the end of this path."""
    assumed = answered.assumed or ()
    return len(path) < len(assumed) and assumed[: len(path)] == tuple(path)


def _below(path: list[int], answered: Query, proposal: Proposal) -> Proposal | None:
    """What is left of an answer behind this path, which began where its query's text ended."""
    assumed = answered.assumed or ()
    if tuple(path[: len(assumed)]) != assumed:
        # It runs in another process; what it asks to know may come with any tree.
        return cut(proposal, 0) if proposal.num_top_next_tokens else None
    return reroot(proposal, np.array(path[len(assumed) :], dtype=np.int32))
