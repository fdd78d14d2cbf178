"""What the answer to a step means for the streamed trees that have slices in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Float32
from ..proposals import FeatureRows
from ..reach import reach_of
from ..request.chosen import Chosen, RowAnswer
from ..request.request import RequestState
from ..tree.streamed_tree import token_tree
from ..tree.tree import NO_TREE, TokenTree
from .slices import TreeSlice, slots_of


class SliceAnswer(NamedTuple):
    """What one request gets from the answer to a slice.

    drafted  its whole tree before the answer, to learn from; none where the root stays
    path     as `Paths` has them: rows of `chosen`, tokens, ids of sources; empty where the root's
             next token is not known yet
    chosen   after the root and the nodes that the root goes over
    rows     of the slice, in which the path's steps are; 0 of a step that is in an earlier one
    features  of these, as far as they are known of all before one; none if nobody wants them
    """

    drafted: TokenTree
    path: Sequence[tuple[int, int, int]]
    chosen: Chosen
    rows: Sequence[int] = ()
    features: Sequence[FeatureRows] = ()


NO_ANSWER = SliceAnswer(NO_TREE, (), Chosen.along(()))


def read_slice(
    state: RequestState, part: TreeSlice, targets: Chosen, block_size: int
) -> SliceAnswer:
    """Take the answer into the request's tree; its next step moves the KV of what was passed.

    A request that has ended, or gave up its KV since, takes nothing: it computes that again.
    """
    stream = part.stream
    if state.has_ended or state.stream is not stream:
        return NO_ANSWER
    part.take(targets)
    if stream.root.target is None:
        # Mostly of a slice that is in vain: the root waits for another.
        return NO_ANSWER
    first = stream.root.position
    drafted = token_tree(stream.alive(), first, part.path.names)
    passed = stream.advance()
    at_leaf = passed.at_leaf and bool(part.nodes)
    stream.outcomes.append((reach_of(len(passed.tokens) - 1), at_leaf))
    if passed.moves:
        moves = slots_of(
            state.block_table(), np.array(passed.moves, dtype=np.int32).ravel(), block_size
        ).reshape(-1, 2)
        state.moves = np.concatenate([state.moves, moves])
    steps = zip(range(len(passed.tokens)), passed.tokens, passed.sources, strict=True)
    rows = [row if chosen is targets else 0 for chosen, row in passed.answers]
    features = _features(state.request_id, first, passed.answers)
    return SliceAnswer(drafted, list(steps), Chosen.along(passed.answers), rows, features)


def _features(request_id: str, position: int, answers: Sequence[RowAnswer]) -> list[FeatureRows]:
    """Those of passed nodes, the first of which stands at `position`; a gap parts them."""
    found: list[FeatureRows] = []
    values: list[Float32] = []
    for place, (chosen, row) in enumerate(answers):
        if chosen.features is not None:
            values.append(chosen.features[row])
        if values and (chosen.features is None or place + 1 == len(answers)):
            end = position + place + (chosen.features is not None)
            found.append(FeatureRows(request_id, end - len(values), np.stack(values)))
            values = []
    return found
