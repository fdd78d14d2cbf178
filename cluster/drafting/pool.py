"""A drafter with several servers: which of them has which request, and when that moves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from ...core.interfaces import PrefixCounts
from ...core.proposals import (
    DraftCost,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
)
from ..links.failures import CircuitBreaker, FailureLog, RetryPolicy, failure_reason
from ..links.link import DrafterLink
from .committed_text import CommittedText
from .drafter_client import DrafterClient
from .replies import DrafterStats

logger = logging.getLogger(__name__)

# A server whose answer is out for so long gives up its requests, if another one answers.
SILENCE_S = 0.4
# And one that was too late so many times in a row, and is so many times slower than another. Both
# together take less than a second, a step and the openings elsewhere included.
MAX_OVERDUE = 2
SLOWER = 3.0
# How long it gets no requests then, longer each time.
SHUNNED = RetryPolicy(tolerated=0, first_delay_s=4.0, max_delay_s=60.0)
# How often a finder is asked.
FIND_PERIOD_S = 1.0
# How long a server's word of what it has of others counts. One that is given nothing says nothing.
BELIEVED_S = 3.0

MakeClient = Callable[[DrafterLink, Mapping[str, CommittedText]], DrafterClient]


class MemberFinder(Protocol):
    """Knows the servers of a pool that grows and shrinks."""

    async def find(self) -> Mapping[str, int]:
        """The servers that take requests now, by a name that no other one ever gets, each with the
        requests that it has open for all coordinators. Raises what the system raises that it asks.
        """
        ...

    def link(self, key: str) -> DrafterLink:
        """A link to one of those that `find` gave last."""
        ...


@dataclass(slots=True, eq=False)
class DrafterPool:
    """A drafter with several servers, between which its requests are shared out.

    links   to the servers, by number or name; those of a `finder` come and go
    finder  where the servers are; None: the links are all there are
    reads_features  whether it goes on from the target's features
    """

    name: str
    max_nodes: int
    keeps_answers: bool
    links: dict[str, DrafterLink] = field(default_factory=dict)
    finder: MemberFinder | None = None
    reads_features: bool = False


@dataclass(slots=True, eq=False)
class Member:
    """One server of a pool.

    texts      of the requests that it has
    shunned    until when it is given none, since it was slow
    num_answers  that it had given when it was shunned last
    """

    client: DrafterClient
    texts: dict[str, CommittedText]
    shunned: CircuitBreaker
    num_answers: int = 0

    def load(self, now: float) -> int:
        """Requests that it has open, of all coordinators as far as is known."""
        is_new = now - self.client.told_at <= BELIEVED_S
        return len(self.texts) + (self.client.num_others if is_new else 0)

    def may_take(self, now: float) -> bool:
        """Whether requests are well with it."""
        client = self.client
        return client.is_up and not client.is_draining and now >= self.shunned.retry_at


class PoolClient:
    """Shares a drafter's requests out among its servers; to the hub it is one `DrafterClient`.

    A request stays with the server that holds its state. When that one is lost, answers nothing
    for `SILENCE_S`, is late where another is not, or says that it will stop, the request is opened
    with all committed tokens at the one that has the fewest; what the old one still says of it is
    dropped. Where no server is well, requests stay with any that can be reached.

    texts         all open requests; the owner keeps it up to date before it calls
    make_client  to one server, with the texts of its requests
    """

    def __init__(
        self,
        pool: DrafterPool,
        texts: Mapping[str, CommittedText],
        make_client: MakeClient,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.name = pool.name
        self.reads_features = pool.reads_features
        self._pool = pool
        self._texts = texts
        self._make_client = make_client
        self._clock = clock
        self._rng = rng
        self._failures = FailureLog(logger, f"drafter={pool.name}", clock=clock)
        self._members: dict[str, Member] = {}
        self._places: dict[str, Member] = {}
        self._finding: asyncio.Task[None] | None = None
        self._is_found = pool.finder is None
        self._num_moved = 0
        # Totals of servers that are gone.
        self._past = added(pool.name, ())
        for key, link in pool.links.items():
            self._add(key, link)

    @property
    def is_up(self) -> bool:
        """Whether any server can be asked."""
        return any(member.client.is_up for member in self._members.values())

    @property
    def is_connecting(self) -> bool:
        """Whether any connection is on its way, or the servers are not found yet."""
        is_finding = self._finding is not None and not self._is_found
        return is_finding or any(one.client.is_connecting for one in self._members.values())

    @property
    def is_awaited(self) -> bool:
        """Whether an answer of this step can be expected within the budget."""
        return any(member.client.is_awaited for member in self._members.values())

    @property
    def is_behind(self) -> bool:
        """Whether a message of an earlier step is on its way to a server that is well."""
        now = self._clock()
        return any(
            member.client.is_behind for member in self._members.values() if member.may_take(now)
        )

    def cost(self) -> DraftCost:
        """What it takes of the engine's time, the servers working side by side."""
        costs = [member.client.cost() for member in self._members.values() if member.client.is_up]
        measured = [cost for cost in costs if cost.message_s]
        if not measured:
            return costs[0] if costs else DraftCost()
        return DraftCost(
            sum(cost.message_s for cost in measured) / len(measured),
            sum(cost.query_s for cost in measured) / len(measured) / len(costs),
            sum(cost.open_token_s for cost in measured) / len(measured) / len(costs),
        )

    def connect(self, now: float) -> None:
        """Begin to connect to the servers that are lost, and to find those that there are."""
        if self._pool.finder is not None and self._finding is None:
            self._finding = asyncio.get_running_loop().create_task(self._find(self._pool.finder))
        for member in list(self._members.values()):
            member.client.connect(now)

    def open(self, request_id: str) -> None:
        """Tell one server of a request in `texts` before it is asked for it."""
        member = self._place(request_id, self._well(self._clock()))
        if member is not None:
            member.client.open(request_id)

    def close(self, request_id: str, text: CommittedText) -> None:
        """A request left `texts`; this was its text."""
        member = self._places.pop(request_id, None)
        if member is not None:
            del member.texts[request_id]
            member.client.close(request_id, text)

    def observe(self, commits: Sequence[StepCommit]) -> None:
        """Keep what the drafter wished to know of commits that `texts` has already."""
        for member in self._members.values():
            member.client.observe(commits)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next messages that ask for their requests."""
        for member in self._members.values():
            member.client.note_features([own for own in rows if own.request_id in member.texts])

    def queue(self, queries: Sequence[Query], budget_s: float) -> bool:
        """Keep the queries of a step for the next messages; see `DrafterClient.queue`."""
        well = self._tend()
        for query in queries:
            if query.request_id in self._texts:
                self._place(query.request_id, well)
        # Servers without queries are called, too: they drop the queries of earlier steps.
        asked = [
            member.client.queue(self._own(member, queries), budget_s)
            for member in self._members.values()
        ]
        # Where no server is up, `send` connects.
        return any(asked) or (bool(queries) and not self.is_up)

    def send(self) -> None:
        """Send what is queued; see `DrafterClient.send`."""
        for member in self._members.values():
            member.client.send()

    def take(self, query: Query) -> Proposal | None:
        """The newest proposal that fits the query's text, or None."""
        member = self._places.get(query.request_id)
        return None if member is None else member.client.take(query)

    def retire(self) -> None:
        """Disconnect from all servers; they are not asked any more."""
        self._stop_finding()
        for member in self._members.values():
            member.client.retire()

    async def stop(self) -> None:
        """Disconnect for good."""
        self._stop_finding()
        await asyncio.gather(*(member.client.stop() for member in self._members.values()))

    def stats(self) -> DrafterStats:
        """Totals of all servers so far."""
        now = [member.client.stats() for member in self._members.values()]
        return replace(
            added(self._pool.name, [*now, self._past]),
            connected=any(one.connected for one in now),
            servers=len(self._well(self._clock())),
            circuit_open=bool(now) and all(one.circuit_open for one in now),
            moved=self._num_moved,
        )

    def progressed(self) -> None:
        """Something happened at a server; requests of one that is lost do not wait for a step.

        Those of one that drains do: what it has just answered is taken first.
        """
        well = self._well(self._clock())
        for member in self._members.values():
            if well and member.texts and not member.client.is_up:
                self._move_all(member, well)

    def _own(self, member: Member, queries: Sequence[Query]) -> list[Query]:
        return [query for query in queries if query.request_id in member.texts]

    def _well(self, now: float) -> list[Member]:
        return [member for member in self._members.values() if member.may_take(now)]

    def _tend(self) -> list[Member]:
        """Move the requests of servers that are not well to those that are; returns these."""
        now = self._clock()
        for member in self._well(now):
            times = member.client.times
            if self._is_slow(member, now):
                member.shunned.fail(now)
                # Its counts start again with its next request.
                times.num_overdue, member.num_answers = 0, times.count
                self._failures.log("slow", "its requests move to other servers of the pool")
            elif times.count > member.num_answers and not times.num_overdue:
                member.shunned.succeed()
        well = self._well(now)
        if well:
            for member in self._members.values():
                if member.texts and not member.may_take(now):
                    self._move_all(member, well)
        return well

    def _is_slow(self, member: Member, now: float) -> bool:
        """Whether another one would draft for its requests in less time."""
        others = [one.client for one in self._well(now) if one is not member]
        client, times = member.client, member.client.times
        if not others or not member.texts:
            return False
        if client.silent_s() > SILENCE_S:
            return any(other.silent_s() <= SILENCE_S for other in others)
        return times.num_overdue >= MAX_OVERDUE and any(
            not other.times.num_overdue and SLOWER * other.times.mean_s < times.mean_s
            for other in others
        )

    def _move_all(self, member: Member, well: Sequence[Member]) -> None:
        for request_id, text in list(member.texts.items()):
            del member.texts[request_id], self._places[request_id]
            member.client.close(request_id, text)
            to = self._place(request_id, well)
            assert to is not None
            to.client.open(request_id)
            self._num_moved += 1

    def _place(self, request_id: str, well: Sequence[Member]) -> Member | None:
        """The server of a request: its own, or the one with the fewest; None if none is up."""
        member = self._places.get(request_id)
        if member is None:
            up = well or [one for one in self._members.values() if one.client.is_up]
            if not up:
                return None
            now = self._clock()
            # Coordinators that see the same do not all choose the same.
            member = min(up, key=lambda one: (one.load(now), self._rng.random()))
            self._places[request_id] = member
            member.texts[request_id] = self._texts[request_id]
        return member

    def _add(self, key: str, link: DrafterLink) -> None:
        texts: dict[str, CommittedText] = {}
        shunned = CircuitBreaker(SHUNNED, self._rng)
        self._members[key] = Member(self._make_client(link, texts), texts, shunned)

    async def _find(self, finder: MemberFinder) -> None:
        """Follow the servers as they come and go."""
        while True:
            try:
                loads = await finder.find()
                if self._finding is not asyncio.current_task():
                    # It was cancelled as the answer came, which `wait_for` prefers.
                    return
                await self._follow(loads, finder)
                self._is_found = True
            except Exception as error:
                # The system that is asked may fail in its own ways; those that are known stay.
                logger.debug("drafter=%s event=not_found", self._pool.name, exc_info=True)
                self._failures.log("not_found", failure_reason(error))
            await asyncio.sleep(FIND_PERIOD_S)

    async def _follow(self, loads: Mapping[str, int], finder: MemberFinder) -> None:
        for key, load in loads.items():
            if key not in self._members:
                self._pool.links[key] = finder.link(key)
                self._add(key, self._pool.links[key])
                self._members[key].client.connect(self._clock())
            member = self._members[key]
            client = member.client
            client.server_load(max(0, load - len(member.texts)), is_draining=client.is_draining)
        gone = self._members.keys() - loads.keys()
        for key in gone:
            self._members[key].client.is_draining = True
        self._tend()
        for key in gone:
            if not self._members[key].texts:
                member = self._members.pop(key)
                ended = replace(member.client.stats(), servers=0, memory_bytes=0)
                self._past = added(self._pool.name, (self._past, ended))
                del self._pool.links[key]
                await member.client.stop()

    def _stop_finding(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            self._finding = None


def added(name: str, every: Sequence[DrafterStats]) -> DrafterStats:
    """The sums of all counts."""
    sums: dict[str, Any] = {
        one.name: sum(getattr(stats, one.name) for stats in every)
        for one in fields(DrafterStats)
        if one.name not in ("name", "connected", "circuit_open", "left_out", "learning", "prefix")
    }
    learning: dict[str, int] = {}
    for stats in every:
        for outcome, count in stats.learning.items():
            learning[outcome] = learning.get(outcome, 0) + count
    prefixes = [stats.prefix for stats in every]
    prefix = PrefixCounts(*(sum(counts) for counts in zip((0, 0), *prefixes, strict=True)))
    return DrafterStats(
        name=name, connected=False, circuit_open=False, learning=learning, prefix=prefix, **sums
    )
