"""Shares of tenants: the work that each has caused, and the order in which their requests run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from .arrays import Int64
from .request.request import RequestState

# Tenants with totals of their own; all others share one.
MAX_TENANTS = 100
OTHERS = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """What one request took until it ended, however it did.

    prompt_tokens      of which KV of `cached_tokens` was there already
    steps              steps that verified a root of it, with nodes or without
    nodes_verified     nodes of its trees, of which `nodes_wasted` were thrown away
    queue_s            from its arrival until it first ran
    status             stop, length or cancelled; or the error's class
    """

    tenant: str
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    steps: int
    nodes_verified: int
    nodes_wasted: int
    queue_s: float
    status: str


@dataclass(slots=True, kw_only=True)
class TenantTotals:
    """The sums of one tenant's ended requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    nodes_verified: int = 0
    nodes_wasted: int = 0
    queue_s: float = 0.0

    def add(self, usage: RequestUsage) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.steps += usage.steps
        self.nodes_verified += usage.nodes_verified
        self.nodes_wasted += usage.nodes_wasted
        self.queue_s += usage.queue_s


class BoundedNames:
    """Labels for tenants: their names for the first `MAX_TENANTS`, one for all that come later."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def label(self, tenant: str) -> str:
        """The tenant's name, or `other`."""
        if tenant in self._names:
            return tenant
        if len(self._names) >= MAX_TENANTS:
            return OTHERS
        self._names.add(tenant)
        return tenant


class EndedRequests:
    """What an engine's ended requests took. `on_end` is called for each, on the engine's thread.

    wasted_by_source  nodes that were verified and thrown away, by drafter
    """

    __slots__ = ("_by_tenant", "_labels", "on_end", "wasted_by_source")

    def __init__(self) -> None:
        self.wasted_by_source: Counter[str] = Counter()
        self.on_end: Callable[[RequestUsage], object] | None = None
        self._labels = BoundedNames()
        self._by_tenant: dict[str, TenantTotals] = {}

    @property
    def by_tenant(self) -> Mapping[str, TenantTotals]:
        """Totals by the tenants' labels."""
        return self._by_tenant

    def note(self, state: RequestState, status: str, now: float) -> None:
        """A request has ended at `now`, of the clock of its arrival."""
        nodes = state.stats.nodes.totals
        self.wasted_by_source.update(nodes.wasted)
        usage = RequestUsage(
            tenant=state.request.options.tenant,
            request_id=state.request_id,
            prompt_tokens=state.prompt_len,
            cached_tokens=state.stats.num_cached_tokens or 0,
            completion_tokens=state.num_answered,
            steps=len(state.stats.accepted_lengths),
            nodes_verified=nodes.drafted.total(),
            nodes_wasted=nodes.wasted.total(),
            # One that was never started has waited all the time.
            queue_s=(state.stats.start_time or now) - state.stats.arrival_time,
            status=status,
        )
        self._by_tenant.setdefault(self._labels.label(usage.tenant), TenantTotals()).add(usage)
        if self.on_end is not None:
            self.on_end(usage)


# Of a prompt's token, and of a root or a node: the paper's, for input and output tokens.
PROMPT_WEIGHT = 1.0
ROW_WEIGHT = 2.0


@dataclass(slots=True)
class _Tenant:
    """One tenant: its counter, and how many of its requests run, and run or wait."""

    weight: float = 1.0
    counter: float = 0.0
    num_running: int = 0
    num_requests: int = 0

    @property
    def share(self) -> float:
        """Running requests by its weight."""
        return self.num_running / self.weight


class FairShare:
    """Counters of the tenants of a replica's requests.

    Where all requests are one tenant's, order is as without it, and nothing is counted.
    """

    __slots__ = ("_known", "_last_counter")

    def __init__(self) -> None:
        self._known: dict[str, _Tenant] = {}
        # Of the tenant that left last: where tenants begin that come alone.
        self._last_counter = 0.0

    @property
    def is_alone(self) -> bool:
        """Whether there is one tenant at most."""
        return len(self._known) <= 1

    @property
    def counters(self) -> Mapping[str, float]:
        """The counter of each tenant that is known: rows by weight."""
        return {name: tenant.counter for name, tenant in self._known.items()}

    def enter(self, state: RequestState) -> None:
        """A request comes. A tenant that had none begins where the least of the others stand, so
        that what it did not use is not saved up."""
        options = state.request.options
        tenant = self._known.setdefault(options.tenant, _Tenant())
        tenant.weight = options.weight
        if not tenant.num_requests:
            active = [other.counter for other in self._known.values() if other.num_requests]
            least = min(active, default=self._last_counter)
            tenant.counter = max(tenant.counter, least)
            self._forget_below(least)
        tenant.num_requests += 1

    def leave(self, state: RequestState) -> None:
        """A request has ended; `stop` was called if it ran."""
        tenant = self._of(state)
        tenant.num_requests -= 1
        if not tenant.num_requests:
            self._last_counter = tenant.counter

    def start(self, state: RequestState) -> None:
        """A request begins to run."""
        self._of(state).num_running += 1

    def stop(self, state: RequestState) -> None:
        """A request stops running."""
        self._of(state).num_running -= 1

    def charge_prompt(self, state: RequestState, start: int, end: int) -> None:
        """The prompt's tokens of a chunk, each once: computing it anew is not charged."""
        if self.is_alone:
            return
        num_new = min(end, state.prompt_len) - max(start, state.stats.num_charged)
        if num_new > 0:
            tenant = self._of(state)
            tenant.counter += PROMPT_WEIGHT * num_new / tenant.weight
            state.stats.num_charged = end

    def charge_trees(self, states: Sequence[RequestState], num_rows: Int64) -> None:
        """Roots and nodes of a step, int64 [states], those of requests that have ended too."""
        if self.is_alone:
            return
        for state, count in zip(states, num_rows.tolist(), strict=True):
            # Of a request that ended, the tenant may be forgotten.
            tenant = self._known.get(state.request.options.tenant)
            if tenant is not None:
                tenant.counter += ROW_WEIGHT * count / tenant.weight

    def first(self, waiting: Sequence[RequestState]) -> RequestState:
        """Who is next of those that wait, which are in the order of priority and arrival."""
        if self.is_alone:
            return waiting[0]
        priority = waiting[0].order[0]
        by_tenant: dict[str, RequestState] = {}
        for state in waiting:
            if state.order[0] != priority or len(by_tenant) == len(self._known):
                break
            by_tenant.setdefault(state.request.options.tenant, state)
        return min(by_tenant.values(), key=self._turn)

    def victim(self, state: RequestState, running: Iterable[RequestState]) -> RequestState | None:
        """Who stops running for `state`: the last of the tenant that has most beyond its
        share, where that has more than `state`'s would have then.

        Never one of a higher priority, and never in turns: the other way round it does not hold.
        """
        if self.is_alone:
            return None
        mine = self._of(state)
        then = (mine.num_running + 1) / mine.weight
        beyond = [
            other
            for other in running
            if other.order[0] >= state.order[0]
            and self._of(other).share > then
            and self._of(other).counter >= mine.counter
        ]
        return max(beyond, key=lambda one: (self._of(one).share, one.order), default=None)

    def in_turn(self, states: Iterable[RequestState]) -> list[RequestState]:
        """Those whose prompts are computed, the first by priority and counter first."""
        if self.is_alone:
            return in_order(states)
        return sorted(states, key=lambda state: (state.order[0], *self._turn(state)))

    def in_order(self, states: Iterable[RequestState]) -> list[RequestState]:
        """Who keeps its KV, the first one surest: by priority, then the first request of each
        tenant before any second, by weight. Whoever is last may go and the others go on."""
        ordered = in_order(states)
        if self.is_alone:
            return ordered
        counts: Counter[str] = Counter()
        ranks: dict[str, float] = {}
        for state in ordered:
            name = state.request.options.tenant
            ranks[state.request_id] = counts[name] / self._known[name].weight
            counts[name] += 1
        return sorted(
            ordered, key=lambda state: (state.order[0], ranks[state.request_id], state.order)
        )

    def may_queue_beyond(self, state: RequestState, most: int) -> bool:
        """Whether a new request may queue though `most` run or wait: its tenant has less than its
        part of them, so that one that floods the queue does not shut others out."""
        name = state.request.options.tenant
        active = {known for known, tenant in self._known.items() if tenant.num_requests} | {name}
        mine = self._known.get(name)
        return len(active) > 1 and (mine.num_requests if mine else 0) < most // len(active)

    def _turn(self, state: RequestState) -> tuple[float, float, tuple[int, int]]:
        tenant = self._of(state)
        return tenant.counter, tenant.share, state.order

    def _of(self, state: RequestState) -> _Tenant:
        return self._known[state.request.options.tenant]

    def _forget_below(self, least: float) -> None:
        """Forget tenants without requests that would begin at `least` again."""
        for name, tenant in list(self._known.items()):
            if not tenant.num_requests and tenant.counter < least:
                del self._known[name]


def in_order(states: Iterable[RequestState]) -> list[RequestState]:
    """Requests by priority and arrival."""
    return sorted(states, key=attrgetter("order"))
