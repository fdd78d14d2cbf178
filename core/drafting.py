"""The drafting half of a step: which drafters are asked, and which trees of their proposals are
verified.

`start` asks the drafters about a group of requests, in the background. `trees` takes what they
proposed: one tree a request, merged, without the tokens that a grammar forbids, cut to the nodes
that are worth their time. `fit` cuts the trees to the KV slots that are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

from .arrays import UInt32
from .errors import DraftlineError
from .grammar_masks import GrammarMaskQueue
from .interfaces import ProposalSource
from .proposals import (
    DraftCost,
    Drafted,
    FeatureRows,
    Probe,
    Proposal,
    Query,
    StepCommit,
)
from .reach import AT_LEAVES, EVERY_REACH
from .request.allowed_tokens import GrammarMasks, rows_in
from .request.request import HeadOrder, RequestState
from .schedule.scheduler import Scheduler
from .schedule.streaming import Streaming, max_depth
from .speculation.draft_plan import NOBODY, DraftBatch, DraftPlan, PlannedRequest, nobody_asked
from .speculation.policy import SpeculationPolicy
from .step.parts import NO_EXTRAS, NO_TREE_STEPS, DraftedTree, DraftedTrees, TreeExtras, TreeSteps
from .streaming.chunks import TreeSlice
from .tree.merge import merge_all
from .tree.tree import empty_trees
from .verify.rules import COUPLED, candidates_of, no_candidates

NO_SIZES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Requests whose drafters are being asked, and the answer to come."""

    states: Sequence[RequestState]
    answer: asyncio.Future[DraftBatch]


class Drafting:
    """Speaks with the drafters, and makes the trees of a step. One event loop uses it."""

    def __init__(
        self,
        drafters: ProposalSource,
        scheduler: Scheduler,
        policy: SpeculationPolicy,
        streaming: Streaming,
        clock: Callable[[], float],
        *,
        acceptance: str,
        fail: Callable[[RequestState, DraftlineError], None],
        notify: Callable[..., None],
    ) -> None:
        """`acceptance`: the rule that decides about drafts.

        fail    ends a request whose grammar fails
        notify  called when drafters have answered, or token masks are there
        """
        self._drafters = drafters
        self._scheduler = scheduler
        self._policy = policy
        self._streaming = streaming
        self._clock = clock
        self._acceptance = acceptance
        self._notify = notify
        self._masks = GrammarMaskQueue(self._allow, fail, notify)
        self._group: _Group | None = None
        self._commits: list[StepCommit] = []
        # Of heads of the last stage, as of the last plan that had them draft: what a further level
        # takes, in tokens that would save as much.
        self._level_tokens: dict[str, float] = {}

    # ---- what drafters receive

    def open(self, state: RequestState) -> None:
        """Begin a request with the drafters, if it wants them and has not begun.

        Drafters that will probably be asked for it receive it now, the others when they are asked.
        """
        if state.request.options.speculative and not state.is_open:
            state.is_open = True
            expected = self._policy.expected(
                _planned(state), self._drafters.costs(), len(self._scheduler.running)
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
        self._masks.forget(state.request_id)
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

    def note_results(self, features: Sequence[FeatureRows], drafted: Sequence[Drafted]) -> None:
        """Keep what a step brought for heads: hidden states for the next message to those of other
        processes, and what those of the last stage drafted for the next step."""
        if features:
            self._drafters.note_features(features)
        if drafted:
            self._drafters.note_drafted(drafted)

    @property
    def stage_heads(self) -> tuple[Sequence[str], Mapping[str, float]]:
        """Names of the last stage's heads, and what a further level of each takes."""
        return self._drafters.stage_heads, self._level_tokens

    # ---- which drafters are asked

    @property
    def late(self) -> set[str]:
        """Requests that wait for token masks, and take part in no step."""
        return self._masks.late()

    @property
    def is_asking(self) -> bool:
        """Whether drafters are being asked, or their answer was not taken yet."""
        return self._group is not None

    @property
    def has_answer(self) -> bool:
        """Whether the drafters that were asked have answered."""
        return self._group is not None and self._group.answer.done()

    async def start(self, states: Sequence[RequestState]) -> None:
        """Begin to ask the drafters about requests that decode."""
        group = self._group = _Group(states, asyncio.ensure_future(self._ask(states)))
        # Drafters of this process have answered after one turn of the loop.
        await asyncio.sleep(0)
        group.answer.add_done_callback(self._notify)

    async def _ask(self, states: Sequence[RequestState]) -> DraftBatch:
        """Proposals of the drafters whose drafts are worth their time now.

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
        """Proposals behind pipelined trees, and the drafters that were skipped.

        Drafters of other processes are only waited for where those of this one are not sure.
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
        # A late proposal may be of a drafter that is not asked now.
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

        Nothing is decided anew behind steps in flight: stages have time for it, and drafters that
        are worth asking for a step are worth more, as long as they are right.
        """
        if not wanting or not costs:
            return NOBODY
        begun = [state for state in wanting if state.stream is None or state.stream.is_new]
        others = len(states) - len(wanting) + self._scheduler.num_prefill_rows(len(states))
        self._streaming.begin_runs(begun)
        plan = NOBODY
        if begun:
            plan = self._policy.plan(
                list(map(_planned, begun)),
                costs,
                others + len(wanting) - len(begun),
                may_decode_several=want_tokens_alone(states),
            )
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
        its heads draft trees of `sizes` nodes for the requests of their orders."""
        # A pipelined tree keeps to what was decided before its first chunk.
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
            self._level_tokens.update(plan.level_tokens)
            for name, reaches_by_id in plan.heads.items():
                for one, reaches in reaches_by_id.items():
                    at_leaves = AT_LEAVES * self._streaming.misses(by_id[one]).at_leaves
                    by_id[one].head_orders[name] = HeadOrder(sizes[one], reaches | at_leaves)

    # ---- which trees are verified

    async def trees(self, patience_s: float) -> tuple[DraftBatch | None, TreeSteps]:
        """What the drafters answered, and the trees of the requests that may be verified now.

        patience_s: how long token masks of grammars are waited for
        """
        if not self.has_answer:
            return None, NO_TREE_STEPS
        assert self._group is not None
        group, self._group = self._group, None
        batch = group.answer.result()
        drafted = self._merge([state for state in group.states if _is_ready(state)], batch)
        most = self._scheduler.nodes_each(len(drafted))
        joined = await self._masks.join(drafted, patience_s, most)
        # Where no masks were wanted nothing was awaited.
        trees = self._select(joined if joined is drafted else joined.where(_is_ready), batch)
        streamed = [s for s in group.states if s.stream is not None and not s.has_ended]
        return batch, self._with_slices(trees, streamed, batch) if streamed else trees

    def _merge(self, states: Sequence[RequestState], batch: DraftBatch) -> DraftedTrees:
        """What drafters propose for each request, in one tree."""
        count = len(states)
        if not batch.by_request:
            return DraftedTrees(states, empty_trees(count), ((),) * count, (0,) * count)
        start = self._clock()
        most = self._scheduler.nodes_each(count)
        proposals = [_wanted(state, batch) for state in states]
        limits = [min(most, state.max_nodes) for state in states]
        offered = limits
        if self._acceptance == COUPLED:
            offered = list(map(self._policy.num_offered, proposals, limits))
        trees = merge_all(proposals, offered, [*map(max_depth, states)], self._policy.table)
        self._policy.note_host(self._clock() - start)
        return DraftedTrees(states, trees, proposals, limits)

    def _allow(self, drafted: DraftedTree, form: GrammarMasks | None) -> DraftedTree:
        """Cut the nodes that the request's rules forbid, which would only cost rows.

        `form`: what its grammar allows, where it has one. Trees of draws stay as they are.
        """
        state, tree = drafted.state, drafted.tree
        permitted = state.request.allowed_tokens
        if permitted is None or self._acceptance != COUPLED:
            return drafted
        answered = state.last_answered(permitted.lookback)
        allowed = permitted.allowed(tree, state.num_answered, answered, form)
        masks = None
        if form is not None:
            masks = form.masks[[0, *(node + 1 for node in allowed.nonzero()[0].tolist())]]
        return replace(drafted, tree=tree.keep(allowed), form=masks)

    def _select(self, drafted: DraftedTrees, batch: DraftBatch) -> TreeSteps:
        """The requests' parts of the step: trees cut to the nodes that are worth their time."""
        if not len(drafted) or not (batch.by_request or len(drafted.trees.nodes)):
            return self._without_drafts(drafted)
        if self._acceptance != COUPLED:
            return self._as_drawn(drafted)
        start = self._clock()
        extras: dict[int, TreeExtras] = {}
        # Few requests have any.
        if _has_extras(chain.from_iterable(drafted.proposals)):
            parts = enumerate(zip(drafted.states, drafted.proposals, strict=True))
            extras = {
                place: TreeExtras(
                    self._probes(state, proposals, batch.plan), _top_next_tokens(proposals)
                )
                for place, (state, proposals) in parts
                if _has_extras(proposals)
            }
        num_probe_rows = sum(
            len(probe.tokens) for own in extras.values() for probe in own.probes.values()
        )
        trees = self._policy.select(
            drafted.trees,
            drafted.max_nodes,
            self._scheduler.num_prefill_rows(len(drafted)) + num_probe_rows,
            ids=[state.request_id for state in drafted.states],
            spent_s=batch.seconds + batch.ahead_s,
            may_decode_several=want_tokens_alone(drafted.states),
        )
        for place, form in drafted.forms.items():
            left = form[rows_in(trees[place], drafted.trees[place])]
            extras[place] = replace(extras.get(place, NO_EXTRAS), form=left)
        self._policy.note_host(self._clock() - start)
        return TreeSteps(drafted.states, trees, drafted.trees, extras)

    def _with_slices(
        self, trees: TreeSteps, states: Sequence[RequestState], batch: DraftBatch
    ) -> TreeSteps:
        """The trees of a step beside chunks of pipelined ones, which grow by the proposals."""
        start = self._clock()
        most = self._scheduler.nodes_each(len(trees) + len(states))
        sliced: list[tuple[RequestState, TreeSlice, TreeExtras]] = []
        for state in states:
            limit, proposals = min(most, state.max_nodes), _wanted(state, batch)
            # Probes go on from the text, not from what is only assumed.
            is_behind = state.stream is not None and state.stream.asked is state.stream.root
            probes = self._probes(state, proposals, batch.plan) if is_behind else {}
            self._streaming.grow(state, proposals, limit)
            if (part := self._streaming.slice(state, limit)) is not None:
                sliced.append((state, part, TreeExtras(probes, _top_next_tokens(proposals))))
        self._policy.note_host(self._clock() - start)
        return trees.beside(sliced)

    def _without_drafts(self, drafted: DraftedTrees) -> TreeSteps:
        none = empty_trees(len(drafted))
        places = drafted.forms if self._acceptance == COUPLED else range(len(drafted))
        extras = {place: self._root_extras(drafted.forms.get(place)) for place in places}
        return TreeSteps(drafted.states, none, none, extras)

    def _as_drawn(self, drafted: DraftedTrees) -> TreeSteps:
        """Trees for a verification rule: cut by the order of nodes, never by what was drawn.

        So no policy selects among the nodes, and no rule of the request: what it forbids, the
        target gives no probability.
        """
        extras = {}
        for place, part in enumerate(drafted.parts()):
            candidates = candidates_of(self._acceptance, part.tree, part.proposals, part.max_nodes)
            own = TreeExtras(self._fitting(part.proposals), _top_next_tokens(part.proposals))
            extras[place] = replace(own, candidates=candidates)
        return TreeSteps(drafted.states, drafted.trees, empty_trees(len(drafted)), extras)

    def _root_extras(self, form: UInt32 | None) -> TreeExtras:
        """What a root alone has beside it. `form`: what is allowed after it, and perhaps more."""
        candidates = None if self._acceptance == COUPLED else no_candidates(self._acceptance)
        return TreeExtras(candidates=candidates, form=None if form is None else form[:1])

    def _probes(
        self, state: RequestState, proposals: Sequence[Proposal], plan: DraftPlan
    ) -> dict[str, Probe]:
        """The probes of a request that are worth their rows."""
        for proposal in proposals:
            if proposal.probe is not None:
                self._policy.note_probe(proposal.source, len(proposal.probe.tokens))
        return self._fitting(
            [p for p in proposals if state.request_id in plan.probing.get(p.source, ())]
        )

    def _fitting(self, proposals: Sequence[Proposal]) -> dict[str, Probe]:
        probes: dict[str, Probe] = {}
        room = self._scheduler.max_probe_rows
        for proposal in proposals:
            if proposal.probe is not None and len(proposal.probe.tokens) <= room:
                probes[proposal.source] = proposal.probe
                room -= len(proposal.probe.tokens)
        return probes

    # ---- which trees have KV slots

    def fit(self, trees: TreeSteps) -> tuple[TreeSteps, int]:
        """The trees of all requests that get KV slots for them, in order; and how many tokens of
        each request the step decodes, which is one beside drafts."""
        num_decode_steps = self._num_decode_steps(trees)
        fitting: list[int] = []
        bare: dict[int, TreeExtras] = {}
        roots = [len(state.token_ids) - 1 for state in trees.states]
        slots = (trees.num_rows + roots + (num_decode_steps - 1)).tolist()
        for place, part in trees.slices.items():
            # With rows of probes.
            slots[place] = part.most_places + slots[place] - roots[place] - len(part.rows)
        missing = self._scheduler.missing_blocks(trees.states, slots)
        for place, state in enumerate(trees.states):
            # Preempted for one before it.
            if not state.kv.blocks:
                continue
            if not missing[place] or self._scheduler.reserve(state, slots[place]):
                fitting.append(place)
            # What its earlier chunks hold may not be dropped.
            elif state.in_flight:
                continue
            # Drafts are never worth the KV of another request.
            elif self._scheduler.make_room(state, roots[place] + 1):
                fitting.append(place)
                bare[place] = self._root_extras(trees.part(place).extras.form)
        # Tenants' turns change with the requests that run, so one that got its slots may have lost
        # them.
        fitting = [place for place in fitting if trees.states[place].kv.blocks]
        fitted = trees.with_bare(bare).select(fitting)
        if num_decode_steps > 1:
            num_decode_steps = min(num_decode_steps, self._scheduler.rows_in_blocks(fitted.states))
        return fitted, num_decode_steps

    def _num_decode_steps(self, trees: TreeSteps) -> int:
        """Tokens of each request in a step of roots alone of which nothing else is wanted."""
        states = trees.states
        if not states or len(trees.trees.nodes) or trees.extras or trees.slices:
            return 1
        if self._scheduler.is_prefilling or not want_tokens_alone(states):
            return 1
        if any(state.wants_features or state.head_orders for state in states):
            return 1
        most = min(state.stop.num_tokens_left for state in states)
        return self._policy.num_decode_steps(len(states), most)


def want_tokens_alone(states: Sequence[RequestState]) -> bool:
    """Whether nothing is asked of these requests' passes but tokens of unchanged logits."""
    return all(state.wants_tokens_alone for state in states)


def _is_ready(state: RequestState) -> bool:
    """Whether a tree can be verified for it; it may have ended, or lost its KV, while drafters were
    asked or masks awaited."""
    is_free = not (state.in_flight or state.has_ended) and state.stream is None
    return is_free and state.is_decoding


def _planned(state: RequestState) -> PlannedRequest:
    request = state.request
    # Whether its text has come to a leaf of a pipelined tree, where heads had no order to draft.
    outcomes = () if state.stream is None else state.stream.outcomes
    ordered = any(order.reaches & AT_LEAVES for order in state.head_orders.values())
    return PlannedRequest(
        state.request_id,
        request.params.temperature,
        request.options.drafters,
        len(state.token_ids),
        state.stop.num_tokens_left,
        state.num_accepted,
        heads_drafted=ordered or not outcomes or not outcomes[-1],
    )


def _asked_of(asked: Mapping[str, Sequence[str]], queries: Sequence[Query]) -> list[Query]:
    """Those for which any drafter is asked."""
    ids = set[str]().union(*asked.values())
    return [query for query in queries if query.request_id in ids]


def _wanted(state: RequestState, batch: DraftBatch) -> Sequence[Proposal]:
    """The proposals of the drafters that the request takes."""
    proposals = batch.by_request.get(state.request_id, ())
    drafters = state.request.options.drafters
    return proposals if drafters is None else [p for p in proposals if p.source in drafters]


def _top_next_tokens(proposals: Sequence[Proposal]) -> dict[str, int]:
    return {p.source: p.num_top_next_tokens for p in proposals if p.num_top_next_tokens}


def _has_extras(proposals: Iterable[Proposal]) -> bool:
    return any(p.probe is not None or p.num_top_next_tokens for p in proposals)
