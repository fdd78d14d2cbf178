"""Which of the proposed nodes go into a step: merged, allowed, and worth their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from ..arrays import UInt32
from ..proposals import Probe, Proposal
from ..request.constraint import TreeForm, rows_in
from ..request.request import RequestState
from ..schedule.scheduler import Scheduler
from ..schedule.streaming import Streaming, max_depth
from ..speculation.draft_plan import DraftBatch, DraftPlan
from ..speculation.policy import SpeculationPolicy
from ..step.drafted_trees import DraftedTree, DraftedTrees
from ..step.tree_steps import NO_WISHES, TreeSteps, TreeWishes
from ..streaming.slices import TreeSlice
from ..tree.merge import merge_all
from ..tree.tree import empty_trees
from ..verify.candidates import candidates_of, no_candidates
from ..verify.rules import COUPLED


class TreeChoice:
    """Makes a tree for each request under the policy."""

    __slots__ = ("_acceptance", "_clock", "_policy", "_scheduler", "_streaming")

    def __init__(
        self,
        scheduler: Scheduler,
        policy: SpeculationPolicy,
        clock: Callable[[], float],
        acceptance: str,
        *,
        streaming: Streaming,
    ) -> None:
        self._acceptance = acceptance
        self._scheduler = scheduler
        self._policy = policy
        self._clock = clock
        self._streaming = streaming

    def merge(self, states: Sequence[RequestState], draft_batch: DraftBatch) -> DraftedTrees:
        """What drafters offer to each request, in one tree."""
        count = len(states)
        if not draft_batch.by_request:
            return DraftedTrees(states, empty_trees(count), ((),) * count, (0,) * count)
        start = self._clock()
        most = self._scheduler.nodes_each(count)
        proposals = [_wanted(state, draft_batch) for state in states]
        limits = [min(most, state.max_nodes) for state in states]
        offered = limits
        if self._acceptance == COUPLED:
            offered = list(map(self._policy.num_offered, proposals, limits))
        trees = merge_all(
            proposals,
            offered,
            [max_depth(state) for state in states],
            self._policy.table,
        )
        self._policy.note_host(self._clock() - start)
        return DraftedTrees(states, trees, proposals, limits)

    def allow(self, drafted: DraftedTree, form: TreeForm | None) -> DraftedTree:
        """Cut the nodes that the request's rules forbid, which would only cost rows.

        `form`: what its constraint allows, where it has one. Trees of draws stay as they are.
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

    def choose(self, drafted: DraftedTrees, draft_batch: DraftBatch) -> TreeSteps:
        """The requests' parts of the step: trees cut to the nodes that are worth their time."""
        if not len(drafted) or not (draft_batch.by_request or len(drafted.trees.nodes)):
            return self._all_bare(drafted)
        if self._acceptance != COUPLED:
            return self._as_drawn(drafted)
        start = self._clock()
        wishes: dict[int, TreeWishes] = {}
        # Mostly nobody has any.
        if _has_wishes(chain.from_iterable(drafted.proposals)):
            wishes = self._own_wishes(drafted, draft_batch.plan)
        num_probe_rows = sum(
            len(probe.tokens) for wish in wishes.values() for probe in wish.probes.values()
        )
        trees = self._policy.select(
            drafted.trees,
            drafted.max_nodes,
            self._scheduler.num_prefill_rows(len(drafted)) + num_probe_rows,
            ids=[state.request_id for state in drafted.states],
            spent_s=draft_batch.seconds + draft_batch.ahead_s,
            may_decode_several=want_tokens_alone(drafted.states),
        )
        for place, form in drafted.forms.items():
            left = form[rows_in(trees[place], drafted.trees[place])]
            wishes[place] = replace(wishes.get(place, NO_WISHES), form=left)
        self._policy.note_host(self._clock() - start)
        return TreeSteps(drafted.states, trees, drafted.trees, wishes)

    def with_slices(
        self, trees: TreeSteps, states: Sequence[RequestState], draft_batch: DraftBatch
    ) -> TreeSteps:
        """The trees of a step beside slices of those of streamed requests, which grow by what
        drafters offer."""
        if not states:
            return trees
        start = self._clock()
        most = self._scheduler.nodes_each(len(trees) + len(states))
        sliced: list[tuple[RequestState, TreeSlice, TreeWishes]] = []
        for state in states:
            limit, proposals = min(most, state.max_nodes), _wanted(state, draft_batch)
            # Probes go on from the text, not from what is only assumed.
            is_behind = state.stream is not None and state.stream.asked is state.stream.root
            probes = self._probes(state, proposals, draft_batch.plan) if is_behind else {}
            self._streaming.grow(state, proposals, limit)
            if (part := self._streaming.slice(state, limit)) is not None:
                wishes = TreeWishes(probes, _top_next_tokens(proposals))
                sliced.append((state, part, wishes))
        self._policy.note_host(self._clock() - start)
        return trees.beside(sliced)

    def _own_wishes(self, drafted: DraftedTrees, plan: DraftPlan) -> dict[int, TreeWishes]:
        parts = enumerate(zip(drafted.states, drafted.proposals, strict=True))
        return {
            place: TreeWishes(self._probes(state, proposals, plan), _top_next_tokens(proposals))
            for place, (state, proposals) in parts
            if _has_wishes(proposals)
        }

    def _all_bare(self, drafted: DraftedTrees) -> TreeSteps:
        none = empty_trees(len(drafted))
        places = drafted.forms if self._acceptance == COUPLED else range(len(drafted))
        wishes = {
            place: bare_wishes(self._acceptance, drafted.forms.get(place)) for place in places
        }
        return TreeSteps(drafted.states, none, none, wishes)

    def _as_drawn(self, drafted: DraftedTrees) -> TreeSteps:
        """Trees for a verification rule: cut by the order of nodes, never by what was drawn.

        So no policy chooses among the nodes, and no rule of the request: what it forbids, the
        target gives no probability.
        """
        wishes = {}
        for place, part in enumerate(drafted.parts()):
            candidates = candidates_of(self._acceptance, part.tree, part.proposals, part.max_nodes)
            wishes[place] = replace(self._wishes(part.proposals), candidates=candidates)
        return TreeSteps(drafted.states, drafted.trees, empty_trees(len(drafted)), wishes)

    def _wishes(self, proposals: Sequence[Proposal]) -> TreeWishes:
        return TreeWishes(self._fitting(proposals), _top_next_tokens(proposals))

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


def bare_wishes(acceptance: str, form: UInt32 | None) -> TreeWishes:
    """What a root alone has beside it. `form`: what is allowed after it, and perhaps more."""
    is_coupled = acceptance == COUPLED
    candidates = None if is_coupled else no_candidates(acceptance)
    return TreeWishes(candidates=candidates, form=None if form is None else form[:1])


def want_tokens_alone(states: Sequence[RequestState]) -> bool:
    """Whether nothing is asked of these requests' passes but tokens of unchanged logits."""
    return all(state.wants_tokens_alone for state in states)


def _top_next_tokens(proposals: Sequence[Proposal]) -> dict[str, int]:
    return {p.source: p.num_top_next_tokens for p in proposals if p.num_top_next_tokens}


def _wanted(state: RequestState, draft_batch: DraftBatch) -> Sequence[Proposal]:
    """The proposals of the drafters that the request takes."""
    proposals = draft_batch.by_request.get(state.request_id, ())
    drafters = state.request.options.drafters
    return proposals if drafters is None else [p for p in proposals if p.source in drafters]


def _has_wishes(proposals: Iterable[Proposal]) -> bool:
    return any(p.probe is not None or p.num_top_next_tokens for p in proposals)
