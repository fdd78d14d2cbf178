"""What requests' parameters change in the logits of a step's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from ..arrays import Int32
from ..request.request import RequestState
from ..sampling.rows import build_edits
from ..steps import LogitEdits
from ..streaming.slices import rows_of_edits
from ..tree.tree import NO_TREE
from .prompt_chunk import PromptChunk
from .tree_steps import TreeStep, TreeSteps

Contain = Callable[[RequestState], AbstractContextManager[None]]


def edits_of_parts(
    trees: TreeSteps, chunks: Sequence[PromptChunk], contain: Contain
) -> tuple[TreeSteps, Sequence[PromptChunk], list[LogitEdits | None]]:
    """The parts whose changes to logits could be made, and these; none where nobody has any.

    contain: what goes wrong with a request's changes ends that request alone
    """
    states = (*trees.states, *(chunk.state for chunk in chunks))
    if not any(state.edits_logits for state in states):
        return trees, chunks, []
    kept, kept_chunks, edits = [], [], []
    for place, tree in enumerate(trees):
        with contain(tree.state):
            edits.append(edits_for(tree))
            kept.append(place)
    for chunk in chunks:
        with contain(chunk.state):
            edits.append(edits_for(chunk))
            kept_chunks.append(chunk)
    return trees.select(kept), kept_chunks, edits


def edits_for(part: TreeStep | PromptChunk) -> LogitEdits | None:
    """What the request's parameters change in the rows of a part, as if they were the first.

    None: nothing, or the part gets no target token.
    """
    if not part.num_chosen:
        return None
    if isinstance(part, TreeStep):
        if part.slice is None:
            return build_edits(part.state, part.tree, 0, part.wishes.form)
        edits = build_edits(part.state, part.slice.path, 0)
        return None if edits is None else rows_of_edits(edits, part.slice.rows)
    permitted = part.state.request.allowed_tokens
    constraint = None if permitted is None else permitted.constraint
    form = None if constraint is None else constraint.first[None]
    return build_edits(part.state, NO_TREE, 0, form)


def placed_edits(chosen: Int32, edits: Sequence[LogitEdits | None]) -> tuple[LogitEdits, ...]:
    """The edits of a step's parts at their rows; `chosen` int32 [parts]: how many each part has."""
    if not edits:
        return ()
    firsts = [0, *chosen.cumsum().tolist()]
    placed = zip(firsts, edits, strict=False)
    return tuple(replace(edit, first_row=first) for first, edit in placed if edit is not None)
