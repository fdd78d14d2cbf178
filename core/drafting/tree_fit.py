"""KV slots for the trees of a step."""

from __future__ import annotations

from ..schedule.scheduler import Scheduler
from ..speculation.policy import SpeculationPolicy
from ..step.tree_steps import TreeSteps, TreeWishes
from .tree_choice import bare_wishes, want_tokens_alone


class TreeFit:
    """Cuts trees to the KV that is free."""

    __slots__ = ("_acceptance", "_policy", "_scheduler")

    def __init__(self, scheduler: Scheduler, policy: SpeculationPolicy, acceptance: str) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self._acceptance = acceptance

    def fit(self, trees: TreeSteps) -> tuple[TreeSteps, int]:
        """The trees of all that get KV slots for them, in order; and how many tokens of each
        request the step decodes, which is one beside drafts."""
        num_decode_steps = self._num_decode_steps(trees)
        fitting: list[int] = []
        bare: dict[int, TreeWishes] = {}
        roots = [len(state.token_ids) - 1 for state in trees.states]
        slots = (trees.num_rows + roots + (num_decode_steps - 1)).tolist()
        for place, part in trees.slices.items():
            # With rows of probes.
            slots[place] = part.most_places + slots[place] - roots[place] - len(part.rows)
        missing = self._scheduler.missing_blocks(trees.states, slots)
        for place, state in enumerate(trees.states):
            # Preempted for one before it.
            if not state.blocks:
                continue
            if not missing[place] or self._scheduler.reserve(state, slots[place]):
                fitting.append(place)
            # What its earlier slices hold may not be dropped.
            elif state.in_flight:
                continue
            # Drafts are never worth the KV of another request.
            elif self._scheduler.make_room(state, roots[place] + 1):
                fitting.append(place)
                bare[place] = bare_wishes(self._acceptance, trees.part(place).wishes.form)
        # Tenants' turns change with who runs, so one that got its slots may have lost them.
        fitting = [place for place in fitting if trees.states[place].blocks]
        fitted = trees.with_bare(bare).select(fitting)
        if num_decode_steps > 1:
            num_decode_steps = min(num_decode_steps, self._scheduler.rows_in_blocks(fitted.states))
        return fitted, num_decode_steps

    def _num_decode_steps(self, trees: TreeSteps) -> int:
        """Tokens of each request in a step of roots alone of which nothing else is wanted."""
        states = trees.states
        if not states or len(trees.trees.nodes) or trees.wishes or trees.slices:
            return 1
        if self._scheduler.is_prefilling:
            return 1
        if not want_tokens_alone(states):
            return 1
        if any(state.wants_features or state.head_orders for state in states):
            return 1
        most = min(state.stop.num_tokens_left for state in states)
        return self._policy.num_decode_steps(len(states), most)
