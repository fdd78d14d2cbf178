"""The drafting half of a step: who is asked, and which of the proposed nodes go into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .arrays import UInt32
from .interfaces import ProposalSource
from .proposals import AskPlan, DraftBatch, Probe, Proposal, Query, StepCommit
from .request.constraint import TreeForm, rows_in
from .request.request import RequestState
from .schedule.budget import NodeBudget
from .schedule.drafter_choice import DraftWish
from .schedule.scheduler import Scheduler
from .step.builder import TreeStep
from .tree.merge import merge_all
from .tree.tree import NO_TREE, TokenTree
from .verify.candidates import candidates_of, no_candidates
from .verify.rules import COUPLED, rule_for

# A budget can only choose where more is offered than a tree may hold.
OFFERED_TREES = 2


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTree:
    """What drafters offer to one request, merged.

    max_nodes  most of its nodes that a step may hold
    form       uint32 [1 + nodes, words]  the tokens that the request's constraint allows after the
               root and each node; None without one
    """

    state: RequestState
    tree: TokenTree
    proposals: Sequence[Proposal]
    max_nodes: int
    form: UInt32 | None = None


class Drafting:
    """Speaks with the drafters for all requests, and makes a tree for each under the budget."""

    __slots__ = (
        "_acceptance", "_budget", "_clock", "_commits", "_drafters", "_merge_s", "_scheduler",
    )  # fmt: skip

    def __init__(
        self,
        drafters: ProposalSource,
        scheduler: Scheduler,
        budget: NodeBudget,
        clock: Callable[[], float],
        acceptance: str = COUPLED,
    ) -> None:
        self._acceptance = acceptance
        self._drafters = drafters
        self._scheduler = scheduler
        self._budget = budget
        self._clock = clock
        self._commits: list[StepCommit] = []
        # Seconds of the last merge.
        self._merge_s = 0.0

    def open(self, state: RequestState) -> None:
        """Begin a request with the drafters, if it wants them and has not begun.

        Those that will probably be asked for it hear of it now, the others if they ever are.
        """
        if state.request.options.speculative and not state.is_open:
            state.is_open = True
            expected = self._budget.expected(
                _wish(state), self._drafters.costs(), len(self._scheduler.running)
            )
            self._drafters.open(state.draft_request(), expected)

    def close(self, state: RequestState) -> None:
        """End a request with every drafter, after handing them its last tokens."""
        self._budget.forget(state.request_id)
        if state.is_open:
            last = [commit for commit in self._commits if commit.request_id == state.request_id]
            self._commits = [
                commit for commit in self._commits if commit.request_id != state.request_id
            ]
            self._drafters.close(state.request_id, last)

    def note_commit(self, commit: StepCommit) -> None:
        """Keep a commit for the next message to the drafters."""
        self._commits.append(commit)

    async def ask(self, states: Sequence[RequestState]) -> DraftBatch:
        """Proposals of those whose drafts are worth their time now, for the requests that these
        are worth it for.

        One message a drafter for all requests, which also tells what was committed.
        """
        began_at = self._clock()
        most = self._scheduler.nodes_each(len(states))
        sizes = [(state, size) for state in states if (size := _query_size(state, most)) > 0]
        costs = self._drafters.costs()
        plan = AskPlan({}, {})
        if sizes and costs:
            others = len(states) - len(sizes) + self._scheduler.num_prefill_rows(len(states))
            plan = self._budget.plan([_wish(state) for state, _ in sizes], costs, others)
        commits, self._commits = self._commits, []
        if not plan.by_drafter:
            if commits:
                await self._drafters.exchange(commits, ())
            return DraftBatch({}, began_at, 0.0, plan, costs)
        asked = set().union(*plan.by_drafter.values())
        queries = [
            Query(state.request_id, len(state.token_ids), size)
            for state, size in sizes
            if state.request_id in asked
        ]
        start = self._clock()
        proposals = await self._drafters.exchange(commits, queries, plan.by_drafter)
        seconds = self._clock() - start
        return DraftBatch(proposals, began_at, seconds, plan, self._drafters.costs())

    def merge(self, states: Sequence[RequestState], draft_batch: DraftBatch) -> list[DraftedTree]:
        """What drafters offer to each request, in one tree."""
        if not draft_batch.by_request:
            return [DraftedTree(state, NO_TREE, (), 0) for state in states]
        start = self._clock()
        most = self._scheduler.nodes_each(len(states))
        proposals = [_wanted(state, draft_batch) for state in states]
        limits = [_max_nodes(state, most) for state in states]
        factor = OFFERED_TREES if self._acceptance == COUPLED else 1
        trees = merge_all(
            proposals,
            [factor * limit for limit in limits],
            [_max_depth(state) for state in states],
            self._budget.table,
        )
        parts = zip(states, trees, proposals, limits, strict=True)
        drafted = [DraftedTree(*part) for part in parts]
        self._merge_s = self._clock() - start
        return drafted

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

    def choose(self, drafted: Sequence[DraftedTree], draft_batch: DraftBatch) -> list[TreeStep]:
        """Each request's part of the step: its tree cut to the nodes that are worth their time."""
        if not draft_batch.by_request and not any(len(part.tree) for part in drafted):
            return [self.bare(part.state, part.form) for part in drafted]
        if self._acceptance != COUPLED:
            return [self._as_drawn(part) for part in drafted]
        start = self._clock()
        probes = [self._probes(part, draft_batch.plan) for part in drafted]
        num_probe_rows = sum(len(probe.tokens) for sent in probes for probe in sent.values())
        trees = self._budget.choose(
            [part.tree for part in drafted],
            [part.max_nodes for part in drafted],
            self._scheduler.num_prefill_rows(len(drafted)) + num_probe_rows,
            ids=[part.state.request_id for part in drafted],
            tried=draft_batch.plan.tried,
            spent_s=draft_batch.seconds,
        )
        steps = [self._cut(*parts) for parts in zip(drafted, trees, probes, strict=True)]
        host_s, self._merge_s = self._merge_s + self._clock() - start, 0.0
        self._budget.note_host(host_s, len(draft_batch.by_request))
        return steps

    def bare(self, state: RequestState, form: UInt32 | None) -> TreeStep:
        """Plain decoding: the root alone. `form`: what is allowed after it, and perhaps more."""
        coupled = self._acceptance == COUPLED
        candidates = None if coupled else no_candidates(rule_for(self._acceptance, ()))
        root = None if form is None else form[:1]
        return TreeStep(state, NO_TREE, {}, NO_TREE, {}, candidates, root)

    def _cut(self, drafted: DraftedTree, tree: TokenTree, probes: dict[str, Probe]) -> TreeStep:
        proposals, form = drafted.proposals, drafted.form
        if form is not None:
            form = form[rows_in(tree, drafted.tree)]
        return TreeStep(
            drafted.state, tree, probes, drafted.tree, _num_top_next_tokens(proposals), None, form
        )

    def _as_drawn(self, drafted: DraftedTree) -> TreeStep:
        """A tree for a verification rule: cut by the order of its nodes, never by what was drawn.

        So no budget chooses among the nodes, and no rule of the request: what it forbids, the
        target gives no probability.
        """
        state, tree, proposals = drafted.state, drafted.tree, drafted.proposals
        rule = rule_for(self._acceptance, proposals)
        candidates = candidates_of(rule, tree, proposals, drafted.max_nodes)
        return TreeStep(
            state,
            tree,
            self._fitting(proposals),
            NO_TREE,
            _num_top_next_tokens(proposals),
            candidates,
        )

    def _probes(self, drafted: DraftedTree, plan: AskPlan) -> dict[str, Probe]:
        """The probes of a request that are worth their rows."""
        if not any(proposal.probe for proposal in drafted.proposals):
            return {}
        request_id = drafted.state.request_id
        for proposal in drafted.proposals:
            if proposal.probe is not None:
                self._budget.note_probe(proposal.source, len(proposal.probe.tokens))
        return self._fitting(
            [p for p in drafted.proposals if request_id in plan.probing.get(p.source, ())]
        )

    def _fitting(self, proposals: Sequence[Proposal]) -> dict[str, Probe]:
        probes: dict[str, Probe] = {}
        room = self._scheduler.max_probe_rows
        for proposal in proposals:
            if proposal.probe is not None and len(proposal.probe.tokens) <= room:
                probes[proposal.source] = proposal.probe
                room -= len(proposal.probe.tokens)
        return probes


def _wish(state: RequestState) -> DraftWish:
    request = state.request
    return DraftWish(
        state.request_id,
        request.params.temperature,
        request.options.namespace,
        request.options.drafters,
        len(state.token_ids),
        state.stop.num_tokens_left,
    )


def _wanted(state: RequestState, draft_batch: DraftBatch) -> Sequence[Proposal]:
    """The proposals of the drafters that the request takes."""
    proposals = draft_batch.by_request.get(state.request_id, ())
    drafters = state.request.options.drafters
    return proposals if drafters is None else [p for p in proposals if p.source in drafters]


def _num_top_next_tokens(proposals: Sequence[Proposal]) -> dict[str, int]:
    return {p.source: p.num_top_next_tokens for p in proposals if p.num_top_next_tokens}


def _query_size(state: RequestState, most: int) -> int:
    """Nodes to ask for; 0 or less where the request takes none."""
    is_drafted = state.request.options.speculative
    return min(_max_nodes(state, most), _max_depth(state)) if is_drafted else 0


def _max_nodes(state: RequestState, most: int) -> int:
    limit = state.request.options.max_nodes
    return most if limit is None else min(most, limit)


def _max_depth(state: RequestState) -> int:
    """Deepest useful node: one more token, the bonus, follows the deepest accepted one."""
    return state.stop.num_tokens_left - 1
