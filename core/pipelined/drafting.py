"""Drafting for pipelined trees: one request's tree goes through the stages in several chunks.

A request whose steps go one at a time keeps one stage busy. While the pipeline takes at
least twice as many steps as there are requests, each request may have several in flight: chunks of
one tree that grows below them. With more requests each has one step in flight, as without this
module. See docs/how-it-works.md,
"Pipelined trees".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..drafting import NO_SIZES, Drafting, asked_of, wanted
from ..errors import DraftlineError
from ..interfaces import ProposalSource
from ..proposals import DraftCost, Proposal, Query, StepCommit
from ..request.request import HeadOrder, RequestState
from ..request.sampling_params import PipeliningMode
from ..scheduler import Scheduler
from ..speculation.draft_plan import NOBODY, DraftBatch, DraftPlan, PlannedRequest
from ..speculation.policy import SpeculationPolicy
from ..step.in_flight import StepInFlight, StepResults
from ..step.parts import NO_EXTRAS, ScheduledStep, TreeExtras, TreeSteps
from ..steps import AT_LEAVES, StepInput, StepOutput
from ..tree.merge import merge, reroot
from .chunks import TreeChunk
from .pace import ChunkPace, Misses
from .tree import PipelinedNode, PipelinedTree, path_to

# Least probability of a node that is sent ahead, for each running request.
LEAST_VALUE = 0.004
# A drafted token that is more probable than not: slow drafters are not waited for.
SURE_VALUE, MOST_FIRSTS = 0.5, 16
# Steps in flight of a request that make a pipelined tree.
MIN_FLIGHTS = 2
# Fewer stages leave little to fill, and on CPUs they share cores.
LEAST_STAGES = 4


@dataclass(slots=True)
class TreeChunkCounts:
    """What went through the stages in chunks.

    chunks        that were sent
    nodes         in them
    pruned_nodes  of these, how many the text had left before their output was there
    idle_turns    turns of a request that might have sent a chunk, and had nothing new
    """

    chunks: int = 0
    nodes: int = 0
    pruned_nodes: int = 0
    idle_turns: int = 0


class PipelinedDrafting(Drafting):
    """Also drafts for requests with steps in flight, below what these verify."""

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
        mode: PipeliningMode,
    ) -> None:
        """`mode`: of the engine; a request may ask for less, and for `on` where this is `auto`."""
        super().__init__(
            drafters, scheduler, policy, clock, acceptance=acceptance, fail=fail, notify=notify
        )
        self._mode: PipeliningMode = mode
        # Of greedy requests, and of those that draw.
        self._misses = Misses(), Misses()
        num_stages = max(1, scheduler.num_groups - 1)
        self.counts = TreeChunkCounts()
        self.pace = ChunkPace(lambda: policy.cost, num_stages, clock)

    # ---- which requests take part in a step

    def decoding(self) -> Sequence[RequestState]:
        """Also requests with steps in flight that may send another chunk."""
        return self._scheduler.decoding(self._masks.late(), self._may_follow)

    def take_delay(self) -> float | None:
        """Seconds until the next chunk may be planned; None where none waits for its turn."""
        return self.pace.take_delay()

    def _num_flights(self, state: RequestState) -> int:
        """Steps that a request may have in flight."""
        options = state.request.options
        mode = "off" if options.explain else options.pipelined_trees
        if mode == "off":
            return 1
        each = self._scheduler.num_flights_each
        if "on" in (self._mode, mode):
            return max(MIN_FLIGHTS, each)
        return each if self.pace.num_stages >= LEAST_STAGES else 1

    def _may_follow(self, state: RequestState) -> bool:
        """Whether a request that has steps in flight may send another."""
        pipelined = state.pipelined
        if pipelined is None or state.in_flight >= self._num_flights(state):
            return False
        if pipelined.is_new:
            return True
        least, depth = self._least_value, state.max_depth
        value = max((node.value for node in pipelined.unsent(least, 1, depth)), default=0.0)
        if (leaf := pipelined.to_extend(least, depth)) is not None:
            # Of what is drafted behind it half is right, as far as anybody knows.
            value = max(value, leaf.value / 2)
        return value > 0 and self.pace.is_turn(pipelined, value)

    @property
    def _least_value(self) -> float:
        """Of a node that is worth its row.

        A row makes every stage's next step longer, for all requests; a node that is missing when
        the text comes there costs its request the time of all stages.
        """
        num_running = len(self._scheduler.running)
        row = self._policy.row_share / self.pace.num_stages
        return max(LEAST_VALUE, row) * num_running

    # ---- which drafters are asked, and for what

    async def start(self, states: Sequence[RequestState]) -> None:
        """Decide first which of these requests have a pipelined tree, and which node of each is to
        be extended."""
        for state in states:
            if not state.in_flight:
                # All that was sent has finished: nothing is lost with an old tree but drafts.
                if self._num_flights(state) == 1 or not _may_be_pipelined(state):
                    state.pipelined = None
                elif state.pipelined is None:
                    last = len(state.token_ids) - 1
                    state.pipelined = PipelinedTree(state.token_ids[last], last)
            if (pipelined := state.pipelined) is not None:
                pipelined.asked = pipelined.to_extend(self._least_value, state.max_depth)
        await super().start(states)

    def _query(self, state: RequestState, most: int) -> Query | None:
        """What drafters may be asked; None also where nothing is to be extended."""
        query = super()._query(state, most)
        if query is None or (pipelined := state.pipelined) is None:
            return query
        if pipelined.asked is None:
            return None
        return query._replace(assumed=tuple(path_to(pipelined.asked)) or None)

    def _plan(
        self,
        states: Sequence[RequestState],
        wanting: Sequence[RequestState],
        costs: Mapping[str, DraftCost],
    ) -> DraftPlan:
        """Requests with steps in flight keep the drafters of their first chunk."""
        if not wanting or not costs:
            return NOBODY
        begun = [state for state in wanting if state.pipelined is None or state.pipelined.is_new]
        for state in begun:
            # Nothing of its tree is on its way: the run of chunks so far is over.
            if state.pipelined is not None and state.pipelined.outcomes:
                self._misses_of(state).note(state.pipelined.outcomes)
                state.pipelined.outcomes = []
        plan = super()._plan(states, begun, costs)
        behind: dict[str, list[str]] = {}
        for state in wanting:
            if (pipelined := state.pipelined) is None:
                continue
            if pipelined.is_new:
                pipelined.drafters = self._in_time(plan.asked(state.request_id), costs)
                continue
            for name in pipelined.drafters:
                if name in costs:
                    behind.setdefault(name, []).append(state.request_id)
        return plan.beside(behind)

    def _planned(self, state: RequestState) -> PlannedRequest:
        """Also whether heads drafted below the leaf that its text has come to."""
        planned = super()._planned(state)
        outcomes = () if state.pipelined is None else state.pipelined.outcomes
        if not outcomes or not outcomes[-1]:
            return planned
        ordered = any(order.length_buckets & AT_LEAVES for order in state.head_orders.values())
        return planned._replace(heads_drafted=ordered)

    def _order(
        self,
        states: Sequence[RequestState],
        plan: DraftPlan,
        sizes: Mapping[str, int] = NO_SIZES,
    ) -> None:
        """A pipelined tree keeps to what was decided before its first chunk."""
        own = [state for state in states if state.pipelined is None or state.pipelined.is_new]
        super()._order(own, plan, sizes)
        for state in own:
            if state.pipelined is not None and self._misses_of(state).at_leaves:
                state.head_orders = {
                    name: HeadOrder(order.max_nodes, order.length_buckets | AT_LEAVES)
                    for name, order in state.head_orders.items()
                }

    def _misses_of(self, state: RequestState) -> Misses:
        """How often chunks of requests like this one end a run."""
        return self._misses[state.request.params.temperature > 0]

    def _in_time(self, names: Sequence[str], costs: Mapping[str, DraftCost]) -> tuple[str, ...]:
        """Those of them that draft in the time that a stage takes: chunks go out so often."""
        own = [(name, costs[name]) for name in names if name in costs]
        return tuple(
            name
            for name, cost in own
            if not cost.is_ahead and cost.message_s + cost.query_s <= self.pace.stage_s
        )

    async def _exchange(
        self,
        states: Sequence[RequestState],
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Sequence[str]],
    ) -> tuple[Mapping[str, Sequence[Proposal]], frozenset[str]]:
        """Where all trees are pipelined, drafters of other processes are only waited for if those
        of this one are not sure."""
        slow = self._drafters.remote & asked.keys()
        is_all = all(state.pipelined is not None for state in states)
        if not is_all or not slow or len(slow) == len(asked):
            return await super()._exchange(states, commits, queries, asked)
        quick = {name: ids for name, ids in asked.items() if name not in slow}
        found = await self._drafters.exchange(commits, asked_of(quick, queries), quick)
        if all(self._is_sure(found.get(query.request_id, ())) for query in queries):
            return found, slow
        late = {name: asked[name] for name in slow}
        more = await self._drafters.exchange((), asked_of(late, queries), late)
        # A late proposal may be of a drafter that is not asked now.
        priority = {name: index for index, name in enumerate(asked)}
        ids = [query.request_id for query in queries]
        both = {one: (*found.get(one, ()), *more.get(one, ())) for one in ids}
        return {
            one: sorted(own, key=lambda each: priority.get(each.source, len(asked)))
            for one, own in both.items()
        }, frozenset()

    def _is_sure(self, proposals: Sequence[Proposal]) -> bool:
        """Whether the next token is probably one that these propose."""
        firsts = merge(proposals, MOST_FIRSTS, 1, self._policy.table)
        return float(firsts.values.max(initial=0.0)) >= SURE_VALUE

    # ---- which nodes go into the step

    def _is_ready(self, state: RequestState) -> bool:
        return state.pipelined is None and super()._is_ready(state)

    def _complete(
        self, trees: TreeSteps, states: Sequence[RequestState], batch: DraftBatch
    ) -> TreeSteps:
        """The trees of a step, and chunks of pipelined ones, which grow by the proposals."""
        states = [s for s in states if s.pipelined is not None and not s.has_ended]
        if not states:
            return trees
        start = self._clock()
        most = self._scheduler.nodes_each(len(trees) + len(states))
        tree_chunks: list[tuple[RequestState, TreeChunk, TreeExtras]] = []
        for state in states:
            limit, proposals = min(most, state.max_nodes), wanted(state, batch)
            # Probes go on from the text, not from what is only assumed.
            is_behind = (
                state.pipelined is not None and state.pipelined.asked is state.pipelined.root
            )
            extras = self._extras([state], [proposals], batch.plan if is_behind else NOBODY)
            self._grow(state, proposals, limit)
            if (part := self._chunk(state, limit)) is not None:
                tree_chunks.append((state, part, extras.get(0, NO_EXTRAS)))
        self._policy.note_host(self._clock() - start)
        return trees.beside(tree_chunks)

    def _grow(self, state: RequestState, proposals: Sequence[Proposal], max_nodes: int) -> None:
        """Add what drafters proposed to the tree, as far as the text has not gone another way."""
        pipelined = state.pipelined
        assert pipelined is not None
        at, pipelined.asked = pipelined.asked, None
        if at is None:
            return
        at.was_asked = True
        if not at.is_alive:
            # The text may have gone over it, and along the drafts.
            since = state.token_ids[at.position + 1 :]
            proposals = [] if at.is_dropped else _rerooted(proposals, since)
            at = pipelined.root
        depth = state.max_depth - (at.position - pipelined.root.position)
        if proposals and depth > 0:
            offered = self._policy.num_offered(proposals, max_nodes)
            pipelined.graft(merge(proposals, offered, depth, self._policy.table), at)

    def _chunk(self, state: RequestState, max_nodes: int) -> TreeChunk | None:
        """What goes into the next step; None where nothing is new."""
        pipelined = state.pipelined
        assert pipelined is not None
        nodes = self._worth(
            pipelined, pipelined.unsent(self._least_value, max_nodes, state.max_depth)
        )
        if not nodes and not pipelined.is_new:
            self.counts.idle_turns += 1
            return None
        self.counts.chunks += 1
        self.counts.nodes += len(nodes)
        return TreeChunk.of(pipelined, nodes, self._policy.table.names)

    def _worth(
        self, pipelined: PipelinedTree, nodes: Sequence[PipelinedNode]
    ) -> Sequence[PipelinedNode]:
        """Those that are worth their rows, given that the text comes to the best of them: a chunk
        that is in vain delays no other request."""
        if not nodes:
            return nodes
        values = np.sort([node.value for node in nodes])[::-1]
        if pipelined.is_new:
            count = self._policy.num_worth(values)
        else:
            count = max(1, self._policy.num_worth(values / values[0]))
        return [node for node in nodes if count and node.value >= values[count - 1]]

    def _slots(self, trees: TreeSteps, num_decode_steps: int) -> list[int]:
        slots = super()._slots(trees, num_decode_steps)
        for index, part in trees.tree_chunks.items():
            # With rows of probes.
            root = len(trees.states[index].token_ids) - 1
            slots[index] = part.most_positions + slots[index] - root - len(part.rows)
        return slots

    def _num_decode_steps(self, trees: TreeSteps, batch: DraftBatch | None) -> int:
        return 1 if trees.tree_chunks else super()._num_decode_steps(trees, batch)

    # ---- what steps in flight tell

    def prepare(self, step: StepInput, scheduled: ScheduledStep) -> StepInput:
        """Note when chunks go out; now and then stages report how long they work on them."""
        step = super().prepare(step, scheduled)
        trees, batch = scheduled.trees, scheduled.draft_batch
        if trees.tree_chunks and self.pace.wants_spans():
            step = replace(step, is_traced=True)
        planned_at = None if batch is None else batch.began_at
        self.pace.sent(_pipelined_trees(trees), len(step.slots), planned_at)
        return step

    def verify(
        self, step: StepInFlight, output: StepOutput, excluded: Sequence[RequestState]
    ) -> StepResults:
        """Count pruned nodes before the output advances any root."""
        if output.stage_spans and step.trees.tree_chunks:
            self.pace.note_spans(output.stage_spans, step.num_rows)
        for part in step.trees.tree_chunks.values():
            self.counts.pruned_nodes += part.num_pruned
        self.pace.finished(_pipelined_trees(step.trees), step.num_rows, step.sent_at)
        return super().verify(step, output, excluded)


def _pipelined_trees(trees: TreeSteps) -> list[PipelinedTree]:
    return [part.pipelined for part in trees.tree_chunks.values()]


def _may_be_pipelined(state: RequestState) -> bool:
    """Whether the request wants drafts, and no masks of a grammar, which follows whole trees."""
    permitted = state.request.allowed_tokens
    has_grammar = permitted is not None and permitted.constraint is not None
    return state.request.options.speculative and not has_grammar


def _rerooted(proposals: Sequence[Proposal], tokens: Sequence[int]) -> list[Proposal]:
    ids = np.array(tokens, dtype=np.int32)
    found = [reroot(proposal, ids) for proposal in proposals]
    return [proposal for proposal in found if proposal is not None]
