"""What requests have taken once they ended: each of them, and in total by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...request.request import RequestState

# Tenants that are told apart in totals; what is beyond goes as one.
MAX_TENANTS = 100
OTHERS = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """What one request took until it ended, however it did.

    prompt_tokens      of which KV of `cached_tokens` was there already
    steps              steps that verified a root of it, with nodes or without
    nodes_verified     nodes of its trees, of which `nodes_wasted` were thrown away
    queue_s            from its arrival to its first place
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
    """What an engine's ended requests took. `on_end` hears of each, on the engine's thread.

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
        nodes = state.nodes.totals
        self.wasted_by_source.update(nodes.wasted)
        usage = RequestUsage(
            tenant=state.request.options.tenant,
            request_id=state.request_id,
            prompt_tokens=state.prompt_len,
            cached_tokens=state.num_cached_tokens or 0,
            completion_tokens=state.num_answered,
            steps=len(state.accepted_lengths),
            nodes_verified=nodes.drafted.total(),
            nodes_wasted=nodes.wasted.total(),
            # One that was never started has waited all the time.
            queue_s=(state.start_time or now) - state.arrival_time,
            status=status,
        )
        self._by_tenant.setdefault(self._labels.label(usage.tenant), TenantTotals()).add(usage)
        if self.on_end is not None:
            self.on_end(usage)
