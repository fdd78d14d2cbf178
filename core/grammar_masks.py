"""Token masks of requests with a structured output, computed beside the engine's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .errors import Contained, DraftlineError
from .request.allowed_tokens import Constraint, GrammarMasks, rows_in
from .request.request import RequestState
from .step.parts import NO_EXTRAS, DraftedTree, DraftedTrees, TreeSteps

Fail = Callable[[RequestState, DraftlineError], None]


@dataclass(slots=True, eq=False)
class _Pending:
    drafted: DraftedTree
    masks: asyncio.Future[GrammarMasks]


class GrammarMaskQueue:
    """Asks for the masks of every constrained request's next tree. One event loop uses it.

    A request whose masks are late takes part in no step until they are there, so that no request
    waits for another's grammar. Its text does not depend on that.
    """

    __slots__ = ("_cuts_trees", "_fail", "_on_ready", "_pending")

    def __init__(self, fail: Fail, on_ready: Callable[[], object], *, cuts_trees: bool) -> None:
        """What is done with masks.

        fail        ends a request whose rules fail
        on_ready    called when masks are there
        cuts_trees  whether nodes that a request's rules forbid are left out. Trees of draws stay as
                    they are
        """
        self._cuts_trees = cuts_trees
        self._fail = fail
        self._on_ready = on_ready
        self._pending: dict[str, _Pending] = {}

    def late(self) -> set[str]:
        """Requests that cannot take part in a step now."""
        return {name for name, pending in self._pending.items() if not pending.masks.done()}

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if pending := self._pending.pop(request_id, None):
            pending.masks.cancel()

    async def join(self, drafted: DraftedTrees, patience_s: float, most_nodes: int) -> DraftedTrees:
        """The requests of a step, in order, whose token masks are there within `patience_s`.

        A request without a structured output needs none.

        most_nodes: of one tree in this step; a tree whose masks were late is of an earlier one.
        """
        if not self._pending and not any(map(_has_rules, drafted.states)):
            return drafted
        parts = drafted.parts()
        constrained = [part.state for part in parts if _constraint(part.state) is not None]
        for part in parts:
            self._ask(part)
        await _wait([self._pending[s.request_id] for s in constrained if self._has(s)], patience_s)
        joined = [self._joined(part, most_nodes) for part in parts]
        return DraftedTrees.of([part for part in joined if part is not None])

    def _has(self, state: RequestState) -> bool:
        return state.request_id in self._pending

    def _ask(self, drafted: DraftedTree) -> None:
        state = drafted.state
        constraint = _constraint(state)
        if constraint is None or self._has(state):
            return
        with Contained(state.request_id, partial(self._fail, state)):
            masks = asyncio.wrap_future(constraint.follow(drafted.tree))
            masks.add_done_callback(self._arrived)
            self._pending[state.request_id] = _Pending(drafted, masks)

    def _arrived(self, masks: asyncio.Future[GrammarMasks]) -> None:
        # A mask that is not needed any more may have failed.
        if not masks.cancelled():
            masks.exception()
        self._on_ready()

    def _joined(self, drafted: DraftedTree, most_nodes: int) -> DraftedTree | None:
        """A request's tree by its rules; of a constrained one the tree that its masks are for.

        None if the request was cancelled meanwhile, has failed, or its masks are late.
        """
        state = drafted.state
        if _constraint(state) is None:
            with Contained(state.request_id, partial(self._fail, state)):
                return self._allowed(drafted, None)
            return None
        pending = self._pending.get(state.request_id)
        if pending is None or not pending.masks.done():
            return None
        del self._pending[state.request_id]
        with Contained(state.request_id, partial(self._fail, state)):
            allowed = self._allowed(pending.drafted, pending.masks.result())
            return replace(allowed, max_nodes=min(allowed.max_nodes, most_nodes))
        return None

    def _allowed(self, drafted: DraftedTree, grammar: GrammarMasks | None) -> DraftedTree:
        """A tree without the nodes that its request's rules forbid, which would only cost rows.

        `grammar`: what its grammar allows, if it has one.
        """
        state, tree = drafted.state, drafted.tree
        permitted = state.request.allowed_tokens
        if permitted is None or not self._cuts_trees:
            return drafted
        answered = state.last_answered(permitted.lookback)
        allowed = permitted.allowed(tree, state.num_answered, answered, grammar)
        masks = None
        if grammar is not None:
            masks = grammar.masks[[0, *(node + 1 for node in allowed.nonzero()[0].tolist())]]
        return replace(drafted, tree=tree.keep(allowed), grammar_masks=masks)


def with_grammar_masks(steps: TreeSteps, drafted: DraftedTrees) -> TreeSteps:
    """The trees of a step with the masks of their rows; they were cut from those of `drafted`."""
    if not drafted.grammar_masks:
        return steps
    extras = dict(steps.extras)
    for index, masks in drafted.grammar_masks.items():
        left = masks[rows_in(steps.trees[index], drafted.trees[index])]
        extras[index] = replace(extras.get(index, NO_EXTRAS), grammar_masks=left)
    return replace(steps, extras=extras)


async def _wait(pending: Sequence[_Pending], seconds: float) -> None:
    late = [one.masks for one in pending if not one.masks.done()]
    if late:
        await asyncio.wait(late, timeout=seconds)


def _has_rules(state: RequestState) -> bool:
    return state.request.allowed_tokens is not None


def _constraint(state: RequestState) -> Constraint | None:
    permitted = state.request.allowed_tokens
    return None if permitted is None else permitted.constraint
