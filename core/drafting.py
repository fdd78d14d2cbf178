"""The drafting half of a step: who is asked, and which of the proposed nodes go into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

from .arrays import UInt32
from .interfaces import ProposalSource
from .proposals import AheadQuery, Drafted, FeatureRows, Probe, Proposal, Query, StepCommit
from .request.constraint import TreeForm, rows_in
from .request.request import RequestState
from .schedule.budget import NodeBudget
from .schedule.choice.wishes import DraftWish
from .schedule.scheduler import Scheduler
from .step.ask_plan import AskPlan, DraftBatch, nobody_asked
from .step.drafted_trees import DraftedTree, DraftedTrees
from .step.prompt_chunk import PromptChunk
from .step.tree_steps import NO_WISHES, TreeSteps, TreeWishes
from .tree.merge import merge_all
from .tree.tree import empty_trees
from .verify.candidates import candidates_of, no_candidates
from .verify.rules import COUPLED, rule_for

NO_SIZES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class DraftingGroup:
    """Requests whose drafters are being asked, and the answer to come."""

    states: Sequence[RequestState]
    answer: asyncio.Future[DraftBatch]


class Drafting:
    """Speaks with the drafters for all requests, and makes a tree for each under the budget."""

    __slots__ = (
        "_acceptance", "_ahead_of", "_budget", "_clock", "_commits", "_drafters", "_scheduler",
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
        # The last step whose answer drafters were asked to guess.
        self._ahead_of: TreeSteps | None = None

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
            names = self._drafters.feature_drafters
            state.wants_features = not names.isdisjoint(expected)
            most = min(self._scheduler.nodes_each(1), state.max_nodes)
            state.head_nodes = {
                name: most for name in self._drafters.stage_heads if name in expected
            }

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

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next message to the drafters that go on from them."""
        if rows:
            self._drafters.note_features(rows)

    def replays(self, trees: TreeSteps) -> list[PromptChunk]:
        """What a step has beside its trees so that drafters get the features that they lack."""
        wanting = [state for state in trees.states if state.wants_features]
        find = self._drafters.missing_features
        found = [(state, find(state.request_id, len(state.token_ids))) for state in wanting]
        missing = [(state, *positions) for state, positions in found if positions]
        return self._scheduler.replays(missing, int(trees.num_rows.sum())) if missing else []

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
        if self._budget.is_quiet(state.request_id for state in states if state.is_open):
            self._order(states, AskPlan({}, {}))
            return nobody_asked(began_at)
        most = self._scheduler.nodes_each(len(states))
        sizes = [(state, size) for state in states if (size := _most_nodes(state, most)) > 0]
        costs = self._drafters.costs()
        plan = AskPlan({}, {})
        if sizes and costs:
            others = len(states) - len(sizes) + self._scheduler.num_prefill_rows(len(states))
            plan = self._budget.plan(
                [_wish(state) for state, _ in sizes], costs, others,
                may_decode_several=_want_tokens_alone(states),
            )  # fmt: skip
        self._order(states, plan, {state.request_id: size for state, size in sizes})
        commits, self._commits = self._commits, []
        asked = set().union(*plan.by_drafter.values())
        queries = [
            Query(state.request_id, len(state.token_ids), size, step_s=plan.step_s)
            for state, size in sizes
            if state.request_id in asked
        ]
        start = self._clock()
        self._budget.note_host(start - began_at)
        if not queries:
            if commits:
                await self._drafters.exchange(commits, ())
            return DraftBatch({}, began_at, 0.0, plan, costs)
        proposals = await self._drafters.exchange(commits, queries, plan.by_drafter)
        seconds = self._clock() - start
        return DraftBatch(proposals, began_at, seconds, plan, self._drafters.costs())

    def go_ahead(self, trees: TreeSteps, draft_batch: DraftBatch | None) -> None:
        """Let drafters that have nothing else to do go on behind a step that is computed.

        Each is told the trees, and guesses where the target will leave them. Not under acceptance
        rules that look at how a draft was drawn.
        """
        is_new = draft_batch is not None and self._ahead_of is not trees
        if draft_batch is None or not is_new or not self._drafters.drafts_ahead:
            return
        self._ahead_of = trees
        asked = draft_batch.plan.by_drafter
        if not asked or self._acceptance != COUPLED:
            return
        most = self._scheduler.nodes_each(len(trees.states))
        queries = []
        for state, tree in zip(trees.states, trees.trees, strict=True):
            # The target says a token at least before what is verified next.
            size = _most_nodes(state, most, 1)
            if size > 0 and not state.has_ended:
                committed_len = len(state.token_ids)
                queries.append(
                    AheadQuery(state.request_id, committed_len, size, tree.tokens, tree.parents)
                )
        if queries:
            self._drafters.draft_ahead(queries, asked)

    def _order(
        self, states: Sequence[RequestState], plan: AskPlan, sizes: Mapping[str, int] = NO_SIZES
    ) -> None:
        """The next step hands out the features of requests that such a drafter is asked for, and
        its heads draft trees of `sizes` nodes for those that they are told to."""
        names = self._drafters.feature_drafters
        if names:
            wanting = set[str]().union(*(plan.by_drafter.get(name, ()) for name in names))
            for state in states:
                state.wants_features = state.request_id in wanting
        if self._drafters.stage_heads:
            for state in states:
                state.head_nodes = {}
            by_id = {state.request_id: state for state in states}
            for name, ids in plan.ahead.items():
                for one in ids:
                    by_id[one].head_nodes[name] = sizes[one]

    def merge(self, states: Sequence[RequestState], draft_batch: DraftBatch) -> DraftedTrees:
        """What drafters offer to each request, in one tree."""
        count = len(states)
        if not draft_batch.by_request:
            return DraftedTrees(states, empty_trees(count), ((),) * count, (0,) * count)
        start = self._clock()
        most = self._scheduler.nodes_each(count)
        proposals = [_wanted(state, draft_batch) for state in states]
        limits = [min(most, state.max_nodes) for state in states]
        factor = self._budget.num_offered_trees if self._acceptance == COUPLED else 1
        trees = merge_all(
            proposals,
            [factor * limit for limit in limits],
            [_max_depth(state) for state in states],
            self._budget.table,
        )
        self._budget.note_host(self._clock() - start)
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
        trees = self._budget.choose(
            drafted.trees,
            drafted.max_nodes,
            self._scheduler.num_prefill_rows(len(drafted)) + num_probe_rows,
            ids=[state.request_id for state in drafted.states],
            spent_s=draft_batch.seconds + draft_batch.ahead_s,
            may_decode_several=_want_tokens_alone(drafted.states),
        )
        for place, form in drafted.forms.items():
            left = form[rows_in(trees[place], drafted.trees[place])]
            wishes[place] = replace(wishes.get(place, NO_WISHES), form=left)
        self._budget.note_host(self._clock() - start)
        return TreeSteps(drafted.states, trees, drafted.trees, wishes)

    def _own_wishes(self, drafted: DraftedTrees, plan: AskPlan) -> dict[int, TreeWishes]:
        parts = enumerate(zip(drafted.states, drafted.proposals, strict=True))
        return {
            place: TreeWishes(self._probes(state, proposals, plan), _top_next_tokens(proposals))
            for place, (state, proposals) in parts
            if _has_wishes(proposals)
        }

    def _all_bare(self, drafted: DraftedTrees) -> TreeSteps:
        none = empty_trees(len(drafted))
        places = drafted.forms if self._acceptance == COUPLED else range(len(drafted))
        wishes = {place: self.bare_wishes(drafted.forms.get(place)) for place in places}
        return TreeSteps(drafted.states, none, none, wishes)

    def bare_wishes(self, form: UInt32 | None) -> TreeWishes:
        """What a root alone has beside it. `form`: what is allowed after it, and perhaps more."""
        coupled = self._acceptance == COUPLED
        candidates = None if coupled else no_candidates(rule_for(self._acceptance, ()))
        return TreeWishes(candidates=candidates, form=None if form is None else form[:1])

    def _as_drawn(self, drafted: DraftedTrees) -> TreeSteps:
        """Trees for a verification rule: cut by the order of nodes, never by what was drawn.

        So no budget chooses among the nodes, and no rule of the request: what it forbids, the
        target gives no probability.
        """
        wishes = {}
        for place, part in enumerate(drafted.parts()):
            rule = rule_for(self._acceptance, part.proposals)
            candidates = candidates_of(rule, part.tree, part.proposals, part.max_nodes)
            wishes[place] = replace(self._wishes(part.proposals), candidates=candidates)
        return TreeSteps(drafted.states, drafted.trees, empty_trees(len(drafted)), wishes)

    def fit(self, trees: TreeSteps) -> tuple[TreeSteps, int]:
        """The trees of all that get KV slots for them, in order; and how many tokens of each
        request the step decodes, which is one beside drafts."""
        num_decode_steps = self._num_decode_steps(trees)
        fitting: list[int] = []
        bare: dict[int, TreeWishes] = {}
        roots = [len(state.token_ids) - 1 for state in trees.states]
        slots = (trees.num_rows + roots + (num_decode_steps - 1)).tolist()
        missing = self._scheduler.missing_blocks(trees.states, slots)
        for place, state in enumerate(trees.states):
            # Preempted for one before it.
            if not state.blocks:
                continue
            if not missing[place] or self._scheduler.reserve(state, slots[place]):
                fitting.append(place)
            # Drafts are never worth the KV of another request.
            elif self._scheduler.make_room(state, roots[place] + 1):
                fitting.append(place)
                bare[place] = self.bare_wishes(trees.part(place).wishes.form)
        fitted = trees.with_bare(bare).select(fitting)
        if num_decode_steps > 1:
            num_decode_steps = min(num_decode_steps, self._scheduler.rows_in_blocks(fitted.states))
        return fitted, num_decode_steps

    def _num_decode_steps(self, trees: TreeSteps) -> int:
        """Tokens of each request in a step of roots alone of which nothing else is wanted."""
        states = trees.states
        if not states or len(trees.trees.nodes) or trees.wishes or self._scheduler.is_prefilling:
            return 1
        if not _want_tokens_alone(states):
            return 1
        if any(state.wants_features or state.head_nodes for state in states):
            return 1
        most = min(state.stop.num_tokens_left for state in states)
        return self._budget.num_decode_steps(len(states), most)

    def _wishes(self, proposals: Sequence[Proposal]) -> TreeWishes:
        return TreeWishes(self._fitting(proposals), _top_next_tokens(proposals))

    def _probes(
        self, state: RequestState, proposals: Sequence[Proposal], plan: AskPlan
    ) -> dict[str, Probe]:
        """The probes of a request that are worth their rows."""
        for proposal in proposals:
            if proposal.probe is not None:
                self._budget.note_probe(proposal.source, len(proposal.probe.tokens))
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


def _want_tokens_alone(states: Sequence[RequestState]) -> bool:
    return all(state.wants_tokens_alone for state in states)


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


def _top_next_tokens(proposals: Sequence[Proposal]) -> dict[str, int]:
    return {p.source: p.num_top_next_tokens for p in proposals if p.num_top_next_tokens}


def _wanted(state: RequestState, draft_batch: DraftBatch) -> Sequence[Proposal]:
    """The proposals of the drafters that the request takes."""
    proposals = draft_batch.by_request.get(state.request_id, ())
    drafters = state.request.options.drafters
    return proposals if drafters is None else [p for p in proposals if p.source in drafters]


def _has_wishes(proposals: Iterable[Proposal]) -> bool:
    return any(p.probe is not None or p.num_top_next_tokens for p in proposals)


def _most_nodes(state: RequestState, most: int, num_ahead: int = 0) -> int:
    """Nodes of a tree that begins `num_ahead` tokens behind the text; 0 where none is of use."""
    # What is left of the answer bounds the tree's depth (`merge`), not its width.
    return min(most, state.max_nodes) if _max_depth(state) > num_ahead else 0


def _max_depth(state: RequestState) -> int:
    """Deepest useful node: one more token, the bonus, follows the deepest accepted one."""
    return state.stop.num_tokens_left - 1
