"""The engine's only access to drafters: it sends commits and collects proposals.

Drafters of this process are called directly (`local_drafter.py`). Those of other processes get a
message each (`drafter_client.py`, `pool.py`), and are waited for until a deadline.
"""

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
from .committed_text import CommittedText
from .drafter_client import DrafterClient
from .head_watch import HeadWatch
from .local_drafter import LocalClient, LocalDrafter
from .pool import DrafterPool, PoolClient
from .replies import DrafterLimits, DrafterStats

# How long a step first waits for answers that are here but not read yet, because the process was
# busy with the target's pass.
GRACE_S = 0.001

# A drafter of this process; the way to one of another process; or to a pool of one's servers.
AnyDrafter = LocalDrafter | DrafterLink | DrafterPool
RemoteClient = DrafterClient | PoolClient
Client = LocalClient | RemoteClient


class DrafterHub:
    """Sends commits to drafters and collects their proposals. One event loop uses it.

    Drafters may be late, dead or wrong. Such a drafter is skipped, tried again after growing
    delays, and receives all committed tokens when it comes back. Its errors never raise here, and
    every proposal has passed `Proposal.check` (and its probe `Probe.check`).

    drafters    in order of priority; names differ
    budget_s    how long a step waits for drafters of other processes, unless `exchange` says so
    clock, rng  seconds that never go back; jitter of delays
    origins     what is said of heads that do not belong to the model, by name
    trace       has a row for each drafter that is asked
    """

    def __init__(
        self,
        drafters: Sequence[AnyDrafter],
        limits: DrafterLimits,
        budget_s: float = 0.05,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        origins: Mapping[str, str] | None = None,
        trace: StepTrace | None = None,
    ) -> None:
        self._texts: dict[str, CommittedText] = {}
        self._budget_s = budget_s
        self._clock = clock
        self._waiter: asyncio.Future[None] | None = None
        self._is_done: Callable[[], bool] = lambda: True
        self._limits, self._rng = limits, rng or random.Random()
        self._trace = trace
        # Those that are left out later, too.
        self._every = [self._client(drafter) for drafter in drafters]
        assert len({client.name for client in self._every}) == len(drafters), "equal names"
        self._use(self._every)
        heads = [client.name for client in (*self._readers, *self._stage_heads)]
        # None once all heads are known.
        self._watch = HeadWatch(heads, origins or {}) if heads else None

    def _use(self, clients: Sequence[Client]) -> None:
        """These are asked from now on."""
        self._clients = clients
        self._local = [client for client in clients if isinstance(client, LocalClient)]
        self._remote = [client for client in clients if not isinstance(client, LocalClient)]
        self._readers = [client for client in clients if client.reads_features]
        self._stage_heads = [client for client in self._local if client.is_ahead]

    def _client(self, drafter: AnyDrafter) -> Client:
        if isinstance(drafter, LocalDrafter):
            return LocalClient(
                drafter, self._texts, self._limits,
                clock=self._clock, rng=self._rng, trace=self._trace,
            )  # fmt: skip
        if not isinstance(drafter, DrafterPool):
            return self._drafter_client(drafter, self._texts, self._on_progress)

        def progressed() -> None:
            client.progressed()
            self._on_progress()

        client = PoolClient(
            drafter,
            self._texts,
            lambda link, texts: self._drafter_client(link, texts, progressed),
            clock=self._clock,
            rng=self._rng,
        )
        return client

    def _drafter_client(
        self,
        link: DrafterLink,
        texts: Mapping[str, CommittedText],
        on_progress: Callable[[], None],
    ) -> DrafterClient:
        return DrafterClient(
            link, texts, self._limits,
            clock=self._clock, rng=self._rng, on_progress=on_progress, trace=self._trace,
        )  # fmt: skip

    async def start(self, timeout_s: float = 10.0) -> None:
        """Connect; return when every drafter is ready or has failed, or after `timeout_s`.

        Those that are not ready are tried again while steps go on.
        """
        for client in self._remote:
            client.connect(self._clock())
        await self._wait(
            timeout_s, lambda: not any(client.is_connecting for client in self._remote)
        )

    async def stop(self) -> None:
        """Disconnect from every drafter, and free those of this process."""
        for client in self._every:
            await client.stop()

    def open(self, request: DraftRequest, at_once: Collection[str] | None = None) -> None:
        """Begin a request, or restart it with other tokens.

        Drafters of other processes that are in `at_once`, by default all, receive it now, so that
        they have read its prompt when they are asked for it. All others receive it with their first
        query.
        """
        self.close(request.request_id)
        self._texts[request.request_id] = CommittedText(request)
        for client in self._remote:
            if at_once is None or client.name in at_once:
                client.open(request.request_id)

    def close(self, request_id: str, last: Sequence[StepCommit] = ()) -> None:
        """End a request with every drafter that knows it, after its `last` commits.

        An unknown id is ignored. Drafters that learn from ended requests receive it in any case.
        """
        self._record(last)
        if self._watch is not None:
            self._watch.forget(request_id)
        text = self._texts.pop(request_id, None)
        if text is not None:
            for client in self._clients:
                client.close(request_id, text)

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
        says for which requests each drafter is asked, by default for all. Drafters that are not
        asked receive no message; the others receive the commits that they missed of these requests.
        """
        budget_s = self._budget_s if budget_s is None else budget_s
        start = self._clock()
        commits = self._record(commits)
        for client in self._clients:
            client.observe(commits)
        if not queries:
            return {}
        remote = [
            client
            for client in self._remote
            if self._queue(client, _wanted(client, queries, asked), budget_s)
        ]
        if remote:
            await self._send(remote, budget_s)
        drafted = {
            client: client.ask(_wanted(client, queries, asked), budget_s) for client in self._local
        }
        if remote:
            left = start + budget_s - self._clock()
            await self._wait(left, lambda: not any(client.is_awaited for client in remote))
        return self._collect(queries, drafted)

    def _queue(self, client: RemoteClient, queries: Sequence[Query], budget_s: float) -> bool:
        """Queue what a drafter is asked for; whether that is anything."""
        is_asked = client.queue(queries, budget_s)
        if not queries:
            # A lost drafter reconnects even if it has no queries now.
            client.connect(self._clock())
        return is_asked

    @property
    def remote(self) -> frozenset[str]:
        """Names of the drafters of other processes, which steps wait for."""
        return frozenset(client.name for client in self._remote)

    def costs(self) -> dict[str, DraftCost]:
        """Seconds that each drafter takes, by name; 0 before it has answered.

        A head that does not belong to the model is left out, and new until that is known.
        """
        costs = {client.name: client.cost() for client in self._clients}
        new = () if self._watch is None else self._watch.new
        costs.update((name, replace(costs[name], is_new=True)) for name in new)
        return costs

    @property
    def stage_heads(self) -> tuple[str, ...]:
        """Names of the drafters that are heads of the last stage, of those in use still."""
        return tuple(client.name for client in self._stage_heads)

    def note_drafted(self, drafted: Sequence[Drafted]) -> None:
        """Keep what those drafted, for the next queries."""
        by_name = {client.name: client for client in self._stage_heads}
        for one in drafted:
            # It may have been left out meanwhile.
            if one.source in by_name:
                by_name[one.source].note_drafted(one)

    @property
    def feature_drafters(self) -> frozenset[str]:
        """Names of the drafters that go on from the target's features."""
        return frozenset(client.name for client in self._readers)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features of open requests until those drafters are asked for them."""
        known = [own for own in rows if own.request_id in self._texts]
        for client in self._readers:
            client.note_features(known)

    def stats(self) -> tuple[DrafterStats, ...]:
        """Totals of every drafter, in order of priority."""
        return tuple(
            replace(client.stats(), left_out=client not in self._clients) for client in self._every
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
        """Stop using these drafters."""
        if not names:
            return
        for client in self._clients:
            if client.name in names:
                client.retire()
        self._use([client for client in self._clients if client.name not in names])

    async def _send(self, remote: Sequence[RemoteClient], budget_s: float) -> None:
        grace_s = min(GRACE_S, budget_s)
        await self._wait(grace_s, lambda: not any(client.is_behind for client in remote))
        for client in remote:
            client.send()
        # One turn of the loop hands the messages to gRPC before local drafters take the thread.
        await asyncio.sleep(0)

    def _collect(
        self,
        queries: Sequence[Query],
        drafted: Mapping[LocalClient, Sequence[tuple[str, Proposal]]],
    ) -> dict[str, list[Proposal]]:
        """All proposals of a step; `drafted` are those of the local drafters."""
        found: dict[str, list[Proposal]] = {query.request_id: [] for query in queries}
        # Requests may have ended while remote drafters were waited for.
        known = [query for query in queries if self._is_known(query)]
        for client in self._clients:
            if isinstance(client, LocalClient):
                for request_id, proposal in drafted.get(client, ()):
                    found[request_id].append(proposal)
                continue
            for query in known:
                if (proposal := client.take(query)) is not None:
                    found[query.request_id].append(proposal)
        if self._watch is not None:
            for query in known:
                self._watch.given(query, found[query.request_id])
        return found

    def _is_known(self, query: Query) -> bool:
        text = self._texts.get(query.request_id)
        return text is not None and text.length >= query.committed_len

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
    client: Client,
    queries: Sequence[Query],
    asked: Mapping[str, Collection[str]] | None,
) -> Sequence[Query]:
    """The queries that a drafter is asked."""
    if asked is None:
        return queries
    ids = asked.get(client.name, ())
    if len(ids) == len(queries):
        return queries
    return [query for query in queries if query.request_id in ids]
