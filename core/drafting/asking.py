"""Who is asked for drafts in a step, and what drafters are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..interfaces import ProposalSource
from ..proposals import (
    DraftCost,
    Drafted,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
)
from ..reach import AT_LEAVES, EVERY_REACH
from ..request.request import HeadOrder, RequestState
from ..schedule.scheduler import Scheduler
from ..schedule.streaming import Streaming, max_depth
from ..speculation.draft_plan import NOBODY, DraftBatch, DraftPlan, DraftWish, nobody_asked
from ..speculation.policy import SpeculationPolicy
from .tree_choice import want_tokens_alone

NO_SIZES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class DraftingGroup:
    """Requests whose drafters are being asked, and the answer to come."""

    states: Sequence[RequestState]
    answer: asyncio.Future[DraftBatch]


class Drafting:
    """Speaks with the drafters for all requests, as the policy says."""

    __slots__ = (
        "_clock",
        "_commits",
        "_drafters",
        "_policy",
        "_scheduler",
        "_streaming",
        "level_tokens",
    )  # fmt: skip

    def __init__(
        self,
        drafters: ProposalSource,
        scheduler: Scheduler,
        policy: SpeculationPolicy,
        clock: Callable[[], float],
        *,
        streaming: Streaming | None = None,
    ) -> None:
        self._streaming = streaming or Streaming(scheduler, policy, clock)
        self._drafters = drafters
        self._scheduler = scheduler
        self._policy = policy
        self._clock = clock
        self._commits: list[StepCommit] = []
        # Of heads of the last stage, as of the last plan that told them to draft: what a further
        # level takes, in tokens that would save as much.
        self.level_tokens: dict[str, float] = {}

    def open(self, state: RequestState) -> None:
        """Begin a request with the drafters, if it wants them and has not begun.

        Those that will probably be asked for it hear of it now, the others if they ever are.
        """
        if state.request.options.speculative and not state.is_open:
            state.is_open = True
            expected = self._policy.expected(
                self._wish(state), self._drafters.costs(), len(self._scheduler.running)
            )
            self._drafters.open(state.draft_request(), expected)
            names = self._drafters.feature_drafters
            state.wants_features = not names.isdisjoint(expected)
            most = min(self._scheduler.nodes_each(1), state.max_nodes)
            state.head_orders = {
                name: HeadOrder(most, EVERY_REACH)
                for name in self._drafters.stage_heads
                if name in expected
            }

    def close(self, state: RequestState) -> None:
        """End a request with every drafter, after handing them its last tokens."""
        self._policy.forget(state.request_id)
        if state.is_open:
            last = [commit for commit in self._commits if commit.request_id == state.request_id]
            self._commits = [
                commit for commit in self._commits if commit.request_id != state.request_id
            ]
            self._drafters.close(state.request_id, last)

    def note_commit(self, commit: StepCommit) -> None:
        """Keep a commit for the next message to the drafters."""
        self._commits.append(commit)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next message to the drafters that go on from them."""
        if rows:
            self._drafters.note_features(rows)

    @property
    def stage_heads(self) -> tuple[str, ...]:
        """Names of the last stage's heads."""
        return self._drafters.stage_heads

    def note_drafted(self, drafted: Sequence[Drafted]) -> None:
        """Keep what heads of the last stage drafted for the next step."""
        if drafted:
            self._drafters.note_drafted(drafted)

    def start(self, states: Sequence[RequestState]) -> DraftingGroup:
        """Begin to ask the drafters about requests that decode; see `ask`."""
        return DraftingGroup(states, asyncio.ensure_future(self.ask(states)))

    async def ask(self, states: Sequence[RequestState]) -> DraftBatch:
        """Proposals of those whose drafts are worth their time now, for the requests that these
        are worth it for.

        One message a drafter for all requests, which also tells what was committed.
        """
        began_at = self._clock()
        self._streaming.begin(states)
        if self._policy.is_backed_off(state.request_id for state in states if state.is_open):
            self._order(states, NOBODY)
            return nobody_asked(began_at)
        most = self._scheduler.nodes_each(len(states))
        wanted = {state.request_id: self._query(state, most) for state in states}
        sizes = [
            (state, query.max_nodes)
            for state in states
            if (query := wanted[state.request_id]) is not None
        ]
        costs = self._drafters.costs()
        plan = self._plan(states, [state for state, _ in sizes], costs)
        self._order(states, plan, {state.request_id: size for state, size in sizes})
        commits, self._commits = self._commits, []
        queries = [
            query._replace(step_s=plan.step_s, token_s=plan.token_s)
            for query in _asked_of(plan.by_drafter, list(filter(None, wanted.values())))
        ]
        start = self._clock()
        self._policy.note_host(start - began_at)
        if not queries:
            if commits:
                await self._drafters.exchange(commits, ())
            return DraftBatch({}, began_at, 0.0, plan, costs)
        skipped = frozenset[str]()
        if all(state.stream is not None for state in states):
            proposals, skipped = await self._exchange(commits, queries, plan.by_drafter)
        else:
            proposals = await self._drafters.exchange(commits, queries, plan.by_drafter)
        seconds = self._clock() - start
        costs = self._drafters.costs()
        return DraftBatch(proposals, began_at, seconds, plan, costs, skipped)

    async def _exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Sequence[str]],
    ) -> tuple[Mapping[str, Sequence[Proposal]], frozenset[str]]:
        """What those propose behind streamed trees who are asked; and who was skipped.

        A slice waits for drafters of other processes only where those of this one are not sure.
        """
        slow = self._drafters.remote & asked.keys()
        if not slow or len(slow) == len(asked):
            return await self._drafters.exchange(commits, queries, asked), frozenset()
        quick = {name: ids for name, ids in asked.items() if name not in slow}
        found = await self._drafters.exchange(commits, _asked_of(quick, queries), quick)
        if all(self._streaming.is_sure(found.get(query.request_id, ())) for query in queries):
            return found, slow
        late = {name: asked[name] for name in slow}
        more = await self._drafters.exchange((), _asked_of(late, queries), late)
        # What comes late may be of one that is not asked now.
        priority = {name: place for place, name in enumerate(asked)}
        ids = [query.request_id for query in queries]
        both = {one: (*found.get(one, ()), *more.get(one, ())) for one in ids}
        return {
            one: sorted(own, key=lambda each: priority.get(each.source, len(asked)))
            for one, own in both.items()
        }, frozenset()

    def _plan(
        self,
        states: Sequence[RequestState],
        wanting: Sequence[RequestState],
        costs: Mapping[str, DraftCost],
    ) -> DraftPlan:
        """Who is asked for those of `wanting`, which are among the step's `states`.

        Nothing is decided anew for what goes on behind steps in flight: stages have time for it,
        and those who are worth asking for a round are worth more, as long as they are right.
        """
        if not wanting or not costs:
            return NOBODY
        begun = [state for state in wanting if state.stream is None or state.stream.is_new]
        others = len(states) - len(wanting) + self._scheduler.num_prefill_rows(len(states))
        plan = NOBODY
        wishes = [self._wish(state) for state in begun]
        self._streaming.begin_runs(begun)
        if wishes:
            plan = self._policy.plan(
                wishes, costs, others + len(wanting) - len(begun),
                may_decode_several=want_tokens_alone(states),
            )  # fmt: skip
        behind: dict[str, list[str]] = {}
        for state in wanting:
            if (stream := state.stream) is None:
                continue
            if stream.is_new:
                stream.drafters = self._streaming.in_time(plan.lasting(state.request_id), costs)
                continue
            for name in stream.drafters:
                if name in costs:
                    behind.setdefault(name, []).append(state.request_id)
        return plan.beside(behind)

    def _query(self, state: RequestState, most: int) -> Query | None:
        """What drafters may be asked for a request; None where no draft is of use."""
        # What is left of the answer bounds the tree's depth (`merge`), not its width.
        size = min(most, state.max_nodes) if max_depth(state) > 0 else 0
        return self._streaming.query(state, size) if size > 0 else None

    def _order(
        self, states: Sequence[RequestState], plan: DraftPlan, sizes: Mapping[str, int] = NO_SIZES
    ) -> None:
        """The next step hands out the features of requests that such a drafter is asked for, and
        its heads draft trees of `sizes` nodes for those that they are told to."""
        # A stream keeps to what was decided before its first slice.
        states = [state for state in states if state.stream is None or state.stream.is_new]
        names = self._drafters.feature_drafters
        if names:
            wanting = set[str]().union(*(plan.by_drafter.get(name, ()) for name in names))
            for state in states:
                state.wants_features = state.request_id in wanting
        if self._drafters.stage_heads:
            for state in states:
                state.head_orders = {}
            by_id = {state.request_id: state for state in states}
            self.level_tokens.update(plan.level_tokens)
            for name, reaches_by_id in plan.heads.items():
                for one, reaches in reaches_by_id.items():
                    at_leaves = AT_LEAVES * self._streaming.misses(by_id[one]).at_leaves
                    by_id[one].head_orders[name] = HeadOrder(sizes[one], reaches | at_leaves)

    def _wish(self, state: RequestState) -> DraftWish:
        request = state.request
        return DraftWish(
            state.request_id,
            request.params.temperature,
            request.options.drafters,
            len(state.token_ids),
            state.stop.num_tokens_left,
            state.num_accepted,
            not _is_undrafted(state),
        )


def _is_undrafted(state: RequestState) -> bool:
    """Whether its text has come to a leaf, and its heads were told not to draft there."""
    outcomes = () if state.stream is None else state.stream.outcomes
    told = any(order.reaches & AT_LEAVES for order in state.head_orders.values())
    return bool(outcomes) and outcomes[-1][1] and not told


def _asked_of(asked: Mapping[str, Sequence[str]], queries: Sequence[Query]) -> list[Query]:
    """Those that somebody is asked."""
    ids = set[str]().union(*asked.values())
    return [query for query in queries if query.request_id in ids]
