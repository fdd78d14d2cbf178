"""The engine's only face to drafters: one message a drafter a step, answers by a deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ...core.proposals import (
    DraftCost,
    Drafted,
    DraftRequest,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
)
from ...core.step.trace import StepTrace
from ..links.link import DrafterLink
from ..links.pool import AnyLink, DrafterPool
from .backlog import CommittedText
from .channel import DrafterChannel, DrafterLimits
from .head_watch import HeadWatch
from .pooled_channel import PooledChannel
from .stats import DrafterStats

# How long a step first waits for answers that are here but not read yet, because the process was
# busy with the target's pass.
GRACE_S = 0.001

Channel = DrafterChannel | PooledChannel


class DrafterHub:
    """Tells drafters what happens and collects proposals. One event loop uses it.

    Drafters may be late, dead or wrong: they are skipped, tried again after growing delays, and
    opened anew with all committed tokens when they come back. Nothing they do raises, and every
    proposal given out has passed `Proposal.check` (and its probe `Probe.check`).

    links       in order of priority, each to a drafter or a pool of one's servers; names differ
    budget_s    how long a step waits for drafters of other processes, unless `exchange` says so
    clock, rng  seconds that never go back; jitter of reconnections
    origins     what is said of heads that do not belong to the model, by name
    trace       has a row for each drafter that messages go to
    """

    def __init__(  # noqa: PLR0913 - one parameter a setting
        self,
        links: Sequence[AnyLink],
        limits: DrafterLimits,
        budget_s: float = 0.05,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        origins: Mapping[str, str] | None = None,
        trace: StepTrace | None = None,
    ) -> None:
        assert len({link.name for link in links}) == len(links), "two drafters of one name"
        self._texts: dict[str, CommittedText] = {}
        self._budget_s = budget_s
        self._clock = clock
        self._waiter: asyncio.Future[None] | None = None
        self._is_done: Callable[[], bool] = lambda: True
        self._limits, self._rng = limits, rng or random.Random()
        self._trace = trace
        self._channels = [
            self._pooled(link) if isinstance(link, DrafterPool) else self._channel(link)
            for link in links
        ]
        self._feature_channels = [
            channel for channel in self._channels if channel.link.reads_features
        ]
        self._stage_channels = [
            channel for channel in self._channels if channel.link.ahead is not None
        ]
        self._remote = [channel for channel in self._channels if not channel.link.is_local]
        # Those that were left out, too.
        self._every = tuple(self._channels)
        heads = [channel.link.name for channel in (*self._feature_channels, *self._stage_channels)]
        # None once all heads are known.
        self._watch = HeadWatch(heads, origins or {}) if heads else None

    def _channel(
        self,
        link: DrafterLink,
        texts: Mapping[str, CommittedText] | None = None,
        on_progress: Callable[[], None] | None = None,
    ) -> DrafterChannel:
        # A head of the last stage has its events in the stage's row.
        trace = self._trace if link.ahead is None else None
        return DrafterChannel(
            link,
            self._texts if texts is None else texts,
            self._limits,
            clock=self._clock,
            rng=self._rng,
            on_progress=on_progress or self._on_progress,
            on_answer=None if trace is None else trace.drafter(link.name),
        )

    def _pooled(self, pool: DrafterPool) -> PooledChannel:
        def progressed() -> None:
            channel.progressed()
            self._on_progress()

        channel = PooledChannel(
            pool,
            self._texts,
            lambda link, texts: self._channel(link, texts, progressed),
            clock=self._clock,
            rng=self._rng,
        )
        return channel

    async def start(self, timeout_s: float = 10.0) -> None:
        """Connect; return when every drafter is ready or has failed, or after `timeout_s`.

        Those that are not ready are tried again while steps go on.
        """
        for channel in self._channels:
            channel.connect(self._clock())
        await self._wait(
            timeout_s, lambda: not any(channel.is_connecting for channel in self._remote)
        )

    async def stop(self) -> None:
        """Disconnect from every drafter."""
        for channel in self._every:
            await channel.stop()

    def open(self, request: DraftRequest, at_once: Collection[str] | None = None) -> None:
        """Begin a request, or begin it anew with other tokens.

        The drafters `at_once`, by default all, are told now: what they do with its prompt is done
        when they are asked for it. The others are told when they are first asked.
        """
        self.close(request.request_id)
        self._texts[request.request_id] = CommittedText(request)
        for channel in self._channels:
            if at_once is None or channel.link.name in at_once:
                channel.open(request.request_id)

    def close(self, request_id: str, last: Sequence[StepCommit] = ()) -> None:
        """End a request with every drafter that knows it, after its `last` commits.

        An unknown id is ignored. Drafters that learn from what ends are told of it in any case.
        """
        self._record(last)
        if self._watch is not None:
            self._watch.forget(request_id)
        text = self._texts.pop(request_id, None)
        if text is not None:
            for channel in self._channels:
                channel.close(request_id, text)

    async def exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Collection[str]] | None = None,
        budget_s: float | None = None,
    ) -> dict[str, list[Proposal]]:
        """Take what was committed, ask for proposals; by request id, in order of priority.

        Drafters of other processes work while the local ones run, and are then waited for until
        `budget_s` is over. Commits of requests that are not open, or that a request was opened
        with already, are ignored; queries of requests that are not open get no proposals. `asked`
        says for which requests each drafter is asked, by default for all. Whoever is asked for
        nothing gets no message, and whoever is asked hears what it missed of these requests.
        """
        budget_s = self._budget_s if budget_s is None else budget_s
        start = self._clock()
        commits = self._record(commits)
        for channel in self._channels:
            channel.observe(commits)
        if not queries:
            return {}
        asked_now = [
            channel
            for channel in self._channels
            if self._queue(channel, _wanted(channel, queries, asked), budget_s)
        ]
        remote = [channel for channel in asked_now if not channel.link.is_local]
        if remote:
            await self._send_remote(remote, budget_s)
        for channel in asked_now:
            if channel.link.is_local:
                channel.send()
        if remote:
            left = start + budget_s - self._clock()
            await self._wait(left, lambda: not any(channel.is_awaited for channel in remote))
        return {query.request_id: self._collect(query) for query in queries}

    def _queue(self, channel: Channel, queries: Sequence[Query], budget_s: float) -> bool:
        """Queue what a drafter is asked for; whether that is anything."""
        is_asked = channel.queue(queries, budget_s)
        if not queries:
            # One that was lost comes back, though nobody asks it now.
            channel.connect(self._clock())
        return is_asked

    @property
    def remote(self) -> frozenset[str]:
        """Names of the drafters of other processes, which steps wait for."""
        return frozenset(channel.link.name for channel in self._remote)

    def costs(self) -> dict[str, DraftCost]:
        """Seconds that each drafter takes, by name; 0 before it has answered.

        A head that does not belong to the model is left out, and new until that is known.
        """
        costs = {channel.link.name: channel.cost() for channel in self._channels}
        new = () if self._watch is None else self._watch.new
        costs.update((name, replace(costs[name], is_new=True)) for name in new)
        return costs

    @property
    def stage_heads(self) -> tuple[str, ...]:
        """Names of the drafters that are heads of the last stage, of those in use still."""
        return tuple(channel.link.name for channel in self._stage_channels)

    def note_drafted(self, drafted: Sequence[Drafted]) -> None:
        """Keep what those drafted, for the next queries."""
        by_name = {channel.link.name: channel for channel in self._stage_channels}
        for one in drafted:
            # It may have been left out meanwhile.
            if one.source in by_name:
                by_name[one.source].note_drafted(one)

    @property
    def feature_drafters(self) -> frozenset[str]:
        """Names of the drafters that go on from the target's features."""
        return frozenset(channel.link.name for channel in self._feature_channels)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features of open requests for the next message to those drafters."""
        known = [own for own in rows if own.request_id in self._texts]
        for channel in self._feature_channels:
            channel.note_features(known)

    def stats(self) -> tuple[DrafterStats, ...]:
        """Totals of every drafter, in order of priority."""
        return tuple(
            replace(channel.stats(), left_out=channel not in self._channels)
            for channel in self._every
        )

    def _record(self, commits: Sequence[StepCommit]) -> list[StepCommit]:
        fresh = []
        for commit in commits:
            text = self._texts.get(commit.request_id)
            if text is not None and commit.base_len >= text.length:
                assert commit.base_len == text.length, "a commit was left out"
                text.append(commit.tokens)
                fresh.append(commit)
        if self._watch is not None:
            self._leave_out(self._watch.committed(fresh))
            if self._watch.is_over:
                self._watch = None
        return fresh

    def _leave_out(self, names: Collection[str]) -> None:
        """These drafters are asked, and told, nothing any more."""
        for channel in [one for one in self._channels if one.link.name in names]:
            channel.retire()
            for channels in (
                self._channels, self._feature_channels, self._stage_channels, self._remote
            ):  # fmt: skip
                if channel in channels:
                    channels.remove(channel)

    async def _send_remote(self, remote: Sequence[Channel], budget_s: float) -> None:
        grace_s = min(GRACE_S, budget_s)
        await self._wait(grace_s, lambda: not any(channel.is_behind for channel in remote))
        for channel in remote:
            channel.send()
        # One turn of the loop hands the messages to gRPC before local drafters take the thread.
        await asyncio.sleep(0)

    def _collect(self, query: Query) -> list[Proposal]:
        text = self._texts.get(query.request_id)
        if text is None or text.length < query.committed_len:
            return []
        taken = [channel.take(query) for channel in self._channels]
        proposals = [proposal for proposal in taken if proposal is not None]
        if self._watch is not None:
            self._watch.given(query, proposals)
        return proposals

    async def _wait(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        if is_done() or timeout_s <= 0:
            return
        assert self._waiter is None, "exchange is called from one task at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        self._is_done = is_done
        try:
            await asyncio.wait((self._waiter,), timeout=timeout_s)
        finally:
            self._waiter = None

    def _on_progress(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._is_done():
            self._waiter.set_result(None)


def _wanted(
    channel: Channel,
    queries: Sequence[Query],
    asked: Mapping[str, Collection[str]] | None,
) -> Sequence[Query]:
    """The queries that a drafter is asked."""
    if asked is None:
        return queries
    ids = asked.get(channel.link.name, ())
    if len(ids) == len(queries):
        return queries
    return [query for query in queries if query.request_id in ids]
