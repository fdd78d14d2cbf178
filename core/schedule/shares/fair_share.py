"""Whose turn it is among tenants: a counter each of the work that its requests have caused.

Virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
charged by rows of steps: of a prompt once, and of trees whether their nodes are accepted or not.
A place beyond a tenant's share goes back to one that lacks it, which the paper leaves to the end of
an answer. Who is first changes when a text comes, and never the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ...arrays import Int64
from ...request.request import RequestState

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
        # Of the tenant that left last: where those begin that find nobody.
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
        """A request takes a place."""
        self._of(state).num_running += 1

    def stop(self, state: RequestState) -> None:
        """A request gives its place up."""
        self._of(state).num_running -= 1

    def charge_prompt(self, state: RequestState, start: int, end: int) -> None:
        """The prompt's tokens of a chunk, each once: to compute it anew is nobody's wish."""
        if self.is_alone:
            return
        num_new = min(end, state.prompt_len) - max(start, state.num_charged)
        if num_new > 0:
            tenant = self._of(state)
            tenant.counter += PROMPT_WEIGHT * num_new / tenant.weight
            state.num_charged = end

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
        """Who gives its place up for `state`: the last of the tenant that has most beyond its
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
        tenant before any second, by weight. Whoever is last may go and the others keep places."""
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

    def is_owed_place(self, state: RequestState, most: int) -> bool:
        """Whether a new request may queue though `most` run or wait: its tenant has less than its
        part of them, so that one that floods the queue shuts nobody out."""
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
