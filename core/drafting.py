"""The drafting half of a step: which drafters are asked, and which trees of their proposals are
verified.

`start` asks the drafters about a group of requests, in the background. `merge_and_select` takes
what they proposed: one tree a request, merged, without the tokens that a grammar forbids, cut to
the nodes that are worth their time. `fit_to_kv` cuts the trees to the KV slots that are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from .arrays import Int32
from .errors import DraftlineError
from .grammar_masks import GrammarMaskQueue, with_grammar_masks
from .interfaces import ProposalSource
from .proposals import (
    DraftCost,
    Proposal,
    Query,
    StepCommit,
)
from .request.request import RequestState
from .scheduler import Scheduler
from .speculation.draft_plan import NOBODY, DraftBatch, DraftPlan, PlannedRequest, nobody_asked
from .speculation.policy import SpeculationPolicy
from .step.heads import HeadOrders, is_ordered
from .step.in_flight import StepInFlight, StepResults, TreeOutput
from .step.parts import (
    NO_TREE_STEPS,
    DraftedTrees,
    ScheduledStep,
    TreeExtras,
    TreeSteps,
)
from .step.probes import extras_of, wants_extras
from .steps import StepInput, StepOutput
from .tree.merge import merge_all
from .tree.tree import empty_trees
from .verify.rules import COUPLED, candidates_of

NO_SIZES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Requests whose drafters are being asked, and their replies to come."""

    states: Sequence[RequestState]
    reply: asyncio.Future[DraftBatch]


class Drafting:
    """Asks the drafters, and makes the trees of a step. One event loop uses it."""

    def __init__(
        self,
        drafters: ProposalSource,
        scheduler: Scheduler,
        policy: SpeculationPolicy,
        clock: Callable[[], float],
        *,
        acceptance: str,
        fail: Callable[[RequestState, DraftlineError], None],
        notify: Callable[..., None],
    ) -> None:
        """`acceptance`: the rule that decides about drafts.

        fail    ends a request whose grammar fails
        notify  called when drafters have replied, or token masks are there
        """
        self._drafters = drafters
        self._scheduler = scheduler
        self._policy = policy
        self._clock = clock
        self._acceptance = acceptance
        self._notify = notify
        self._masks = GrammarMaskQueue(fail, notify, cuts_trees=acceptance == COUPLED)
        self._heads = HeadOrders(drafters)
        self._group: _Group | None = None
        self._commits: list[StepCommit] = []

    # ---- what drafters receive

    def open(self, state: RequestState) -> None:
        """Begin a request with the drafters, if it wants them and has not begun.

        Drafters that will probably be asked for it receive it now, the others when they are asked.
        """
        if state.request.options.speculative and not state.is_open:
            state.is_open = True
            expected = self._policy.expected(
                self._planned(state), self._drafters.costs(), len(self._scheduler.running)
            )
            self._drafters.open(state.draft_request(), expected)
            most = min(self._scheduler.nodes_each(1), state.max_nodes)
            self._heads.open(state, expected, most)

    def close(self, state: RequestState) -> None:
        """End a request with every drafter, after handing them its last tokens."""
        self._masks.forget(state.request_id)
        self._policy.forget(state.request_id)
        if state.is_open:
            last = [commit for commit in self._commits if commit.request_id == state.request_id]
            self._commits = [
                commit for commit in self._commits if commit.request_id != state.request_id
            ]
            self._drafters.close(state.request_id, last)

    def note_commit(
        self, state: RequestState, base_len: int, tokens: Int32, output: TreeOutput
    ) -> None:
        """Keep a commit after the first `base_len` tokens for the next message to the drafters."""
        if state.is_open:
            probed = output.probe_ids, output.top_next_tokens
            self._commits.append(StepCommit(state.request_id, base_len, tokens, *probed))

    # ---- which drafters are asked

    def decoding(self) -> Sequence[RequestState]:
        """One group of requests whose next trees may be drafted now."""
        return self._scheduler.decoding(self._masks.late())

    @property
    def is_waiting(self) -> bool:
        """Whether drafters are being asked, or token masks are awaited."""
        return self._group is not None or bool(self._masks.late())

    @property
    def is_asking(self) -> bool:
        """Whether drafters are being asked, or their reply was not taken yet."""
        return self._group is not None

    @property
    def has_reply(self) -> bool:
        """Whether the drafters that were asked have replied."""
        return self._group is not None and self._group.reply.done()

    def take_delay(self) -> float | None:
        """Seconds until another chunk of a pipelined tree may go out; None: none waits."""
        return None

    async def start(self, states: Sequence[RequestState]) -> None:
        """Begin to ask the drafters about requests that decode."""
        group = self._group = _Group(states, asyncio.ensure_future(self._ask(states)))
        # Drafters of this process have replied after one turn of the loop.
        await asyncio.sleep(0)
        group.reply.add_done_callback(self._notify)

    async def _ask(self, states: Sequence[RequestState]) -> DraftBatch:
        """Proposals of the drafters whose drafts are worth their time now.

        One message a drafter for all requests, which also tells what was committed.
        """
        began_at = self._clock()
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
            for query in asked_of(plan.by_drafter, list(filter(None, wanted.values())))
        ]
        start = self._clock()
        self._policy.note_host(start - began_at)
        if not queries:
            if commits:
                await self._drafters.exchange(commits, ())
            return DraftBatch({}, began_at, 0.0, plan, costs)
        proposals, skipped = await self._exchange(states, commits, queries, plan.by_drafter)
        seconds = self._clock() - start
        costs = self._drafters.costs()
        return DraftBatch(proposals, began_at, seconds, plan, costs, skipped)

    async def _exchange(
        self,
        states: Sequence[RequestState],
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Sequence[str]],
    ) -> tuple[Mapping[str, Sequence[Proposal]], frozenset[str]]:
        """Proposals for the step's `states`, and the drafters that were not waited for.

        `PipelinedDrafting` does not wait for all.
        """
        del states
        return await self._drafters.exchange(commits, queries, asked), frozenset()

    def _plan(
        self,
        states: Sequence[RequestState],
        wanting: Sequence[RequestState],
        costs: Mapping[str, DraftCost],
    ) -> DraftPlan:
        """Which drafters are asked for those of `wanting`, which are among the step's `states`."""
        if not wanting or not costs:
            return NOBODY
        others = len(states) - len(wanting) + self._scheduler.num_prefill_rows(len(states))
        return self._policy.plan(
            list(map(self._planned, wanting)),
            costs,
            others,
            may_decode_several=want_tokens_alone(states),
        )

    def _planned(self, state: RequestState) -> PlannedRequest:
        """What the policy plans for."""
        request = state.request
        return PlannedRequest(
            state.request_id,
            request.params.temperature,
            request.options.drafters,
            len(state.token_ids),
            state.stop.num_tokens_left,
            state.num_accepted,
        )

    def _query(self, state: RequestState, most: int) -> Query | None:
        """What drafters may be asked for a request; None where no draft is of use."""
        # What is left of the answer bounds the tree's depth (`merge`), not its width.
        size = min(most, state.max_nodes) if state.max_depth > 0 else 0
        return Query(state.request_id, len(state.token_ids), size) if size > 0 else None

    def _order(
        self, states: Sequence[RequestState], plan: DraftPlan, sizes: Mapping[str, int] = NO_SIZES
    ) -> None:
        """Order of the next step what heads need and draft; trees have at most `sizes` nodes."""
        self._heads.order(states, plan, sizes)

    # ---- which trees are verified

    async def merge_and_select(self, patience_s: float) -> tuple[DraftBatch | None, TreeSteps]:
        """What the drafters replied, and the trees of the requests that may be verified now.

        patience_s: how long token masks of grammars are waited for
        """
        if not self.has_reply:
            return None, NO_TREE_STEPS
        assert self._group is not None
        group, self._group = self._group, None
        batch = group.reply.result()
        drafted = self._merge([state for state in group.states if self._is_ready(state)], batch)
        most = self._scheduler.nodes_each(len(drafted))
        joined = await self._masks.join(drafted, patience_s, most)
        # Where no masks were wanted nothing was awaited.
        trees = self._select(joined if joined is drafted else joined.where(self._is_ready), batch)
        return batch, self._complete(trees, group.states, batch)

    def _is_ready(self, state: RequestState) -> bool:
        """Whether a tree can be verified for it; it may have ended, or lost its KV, while drafters
        were asked or masks awaited."""
        return not (state.in_flight or state.has_ended) and state.is_decoding

    def _complete(
        self, trees: TreeSteps, states: Sequence[RequestState], batch: DraftBatch
    ) -> TreeSteps:
        """The trees of a step; `PipelinedDrafting` adds chunks of pipelined ones of `states`."""
        del states, batch
        return trees

    def _merge(self, states: Sequence[RequestState], batch: DraftBatch) -> DraftedTrees:
        """What drafters propose for each request, in one tree."""
        count = len(states)
        if not batch.by_request:
            return DraftedTrees(states, empty_trees(count), ((),) * count, (0,) * count)
        start = self._clock()
        most = self._scheduler.nodes_each(count)
        proposals = [wanted(state, batch) for state in states]
        limits = [min(most, state.max_nodes) for state in states]
        offered = limits
        if self._acceptance == COUPLED:
            offered = list(map(self._policy.num_offered, proposals, limits))
        trees = merge_all(
            proposals, offered, [state.max_depth for state in states], self._policy.table
        )
        self._policy.note_host(self._clock() - start)
        return DraftedTrees(states, trees, proposals, limits)

    def _select(self, drafted: DraftedTrees, batch: DraftBatch) -> TreeSteps:
        """The requests' parts of the step: trees cut to the nodes that are worth their time."""
        if self._acceptance != COUPLED:
            return self._as_drawn(drafted)
        if not (batch.by_request or len(drafted.trees.nodes)):
            none = empty_trees(len(drafted))
            return with_grammar_masks(TreeSteps(drafted.states, none, none), drafted)
        start = self._clock()
        extras = self._extras(drafted.states, drafted.proposals, batch.plan)
        num_probe_rows = sum(own.num_probe_rows for own in extras.values())
        trees = self._policy.select(
            drafted.trees,
            drafted.max_nodes,
            self._scheduler.num_prefill_rows(len(drafted)) + num_probe_rows,
            ids=[state.request_id for state in drafted.states],
            spent_s=batch.seconds + batch.ahead_s,
            may_decode_several=want_tokens_alone(drafted.states),
        )
        steps = TreeSteps(drafted.states, trees, drafted.trees, extras)
        steps = with_grammar_masks(steps, drafted)
        self._policy.note_host(self._clock() - start)
        return steps

    def _as_drawn(self, drafted: DraftedTrees) -> TreeSteps:
        """Trees for a verification rule: cut by the order of nodes, never by what was drawn.

        Neither the policy nor rules of the request cut nodes: forbidden tokens have probability 0.
        """
        extras = {}
        for index, part in enumerate(drafted.parts()):
            candidates = candidates_of(self._acceptance, part.tree, part.proposals, part.max_nodes)
            own = extras_of(part.proposals, self._scheduler.max_probe_rows)
            extras[index] = replace(own, candidates=candidates)
        return TreeSteps(drafted.states, drafted.trees, empty_trees(len(drafted)), extras)

    def _extras(
        self,
        states: Sequence[RequestState],
        proposals: Sequence[Sequence[Proposal]],
        plan: DraftPlan,
    ) -> dict[int, TreeExtras]:
        """What drafters want beside the requests' trees, by a request's index; probes where they
        are worth their rows."""
        extras = dict[int, TreeExtras]()
        for index, own in enumerate(proposals):
            if not wants_extras(own):
                continue
            for proposal in own:
                if proposal.probe is not None:
                    self._policy.note_probe(proposal.source, len(proposal.probe.tokens))
            probers = plan.probers(states[index].request_id)
            extras[index] = extras_of(own, self._scheduler.max_probe_rows, probers)
        return extras

    # ---- which trees have KV slots

    def fit_to_kv(self, trees: TreeSteps, batch: DraftBatch | None) -> tuple[TreeSteps, int]:
        """The trees of all requests that get KV slots for them, in order; and how many tokens of
        each request the step decodes (1 if it has drafts)."""
        num_decode_steps = self._num_decode_steps(trees, batch)
        fitting: list[int] = []
        bare: list[int] = []
        slots = self._slots(trees, num_decode_steps)
        missing = self._scheduler.missing_blocks(trees.states, slots)
        for index, state in enumerate(trees.states):
            # Preempted for one before it.
            if not state.kv.blocks:
                continue
            if not missing[index] or self._scheduler.reserve(state, slots[index]):
                fitting.append(index)
            # Its rows on the way hold KV that may not be dropped.
            elif state.in_flight:
                continue
            # Drafts are never worth the KV of another request.
            elif self._scheduler.make_room(state, len(state.token_ids)):
                fitting.append(index)
                bare.append(index)
        # Tenants' turns change with the requests that run, so one that got its slots may have lost
        # them.
        fitting = [index for index in fitting if trees.states[index].kv.blocks]
        fitted = trees.with_bare(bare).select(fitting)
        if num_decode_steps > 1:
            num_decode_steps = min(num_decode_steps, self._scheduler.rows_in_blocks(fitted.states))
        return fitted, num_decode_steps

    def _slots(self, trees: TreeSteps, num_decode_steps: int) -> list[int]:
        """KV slots that each request needs for the step, committed ones included."""
        roots = [len(state.token_ids) - 1 for state in trees.states]
        return (trees.num_rows + roots + (num_decode_steps - 1)).tolist()

    # ---- the step around the trees

    def prepare(self, step: StepInput, scheduled: ScheduledStep) -> StepInput:
        """The step as it goes out: with what heads read and draft in it."""
        return self._heads.add_to(step, scheduled.trees, scheduled.prompt_chunks)

    def verify(
        self, step: StepInFlight, output: StepOutput, excluded: Sequence[RequestState]
    ) -> StepResults:
        """Walk the trees of a step by its output; heads get what it brought for them.

        excluded: requests whose part of the output does not count
        """
        results = step.results(output)
        if excluded:
            results = results.without(excluded, step)
        self._heads.note(results.heads)
        return results

    def _num_decode_steps(self, trees: TreeSteps, batch: DraftBatch | None) -> int:
        """Tokens of each request in a step of roots alone of which nothing else is wanted."""
        states = trees.states
        if not states or len(trees.trees.nodes) or trees.extras:
            return 1
        if self._scheduler.is_prefilling or not want_tokens_alone(states):
            return 1
        if any(map(is_ordered, states)):
            return 1
        most = min(state.stop.num_tokens_left for state in states)
        asked = batch is not None and bool(batch.plan.by_drafter)
        return self._policy.num_decode_steps(len(states), most, drafters_asked=asked)


def want_tokens_alone(states: Sequence[RequestState]) -> bool:
    """Whether nothing is asked of these requests' passes but tokens of unchanged logits."""
    return all(state.wants_tokens_alone for state in states)


def asked_of(asked: Mapping[str, Sequence[str]], queries: Sequence[Query]) -> list[Query]:
    """Those for which any drafter is asked."""
    ids = set[str]().union(*asked.values())
    return [query for query in queries if query.request_id in ids]


def wanted(state: RequestState, batch: DraftBatch) -> Sequence[Proposal]:
    """The proposals of the drafters that the request takes."""
    proposals = batch.by_request.get(state.request_id, ())
    drafters = state.request.options.drafters
    return proposals if drafters is None else [p for p in proposals if p.source in drafters]
