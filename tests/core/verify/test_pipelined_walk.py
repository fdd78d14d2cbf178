"""The walk from chunk to chunk; `tests/core/test_pipelined.py` compares it with texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from draftline.core.steps import HeadInput, StepInput, TreeRows, prompt_step
from draftline.core.tree.tree_loops import pack
from draftline.core.verify.pipelined_walk import MOST_REQUESTS, PipelinedWalks, WalkedRow


def chunk_step(
    key: int,
    tokens: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[int],
    sees: Sequence[Sequence[int]],
    *,
    num_probes: int = 0,
) -> StepInput:
    """A chunk: its rows, root first, and probes behind them; `sees`: slots that each row sees."""
    count, every = len(tokens), sorted({slot for own in sees for slot in own})
    mask = np.array([[slot in own for slot in every] for own in sees])
    own_slots = np.array(every, dtype=np.int32)
    tree = TreeRows(pack(mask), own_slots, np.zeros(len(every), dtype=np.int32))
    return replace(
        prompt_step(count, 64),
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=np.array(slots, dtype=np.int32),
        trees=[tree],
        logits_rows=np.arange(count - num_probes, dtype=np.int32),
        request_keys=(key,),
        heads=HeadInput(chunk_requests=(0,)),
    )


def targets(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_a_slice_goes_on_where_the_one_before_left_the_text() -> None:
    walks = PipelinedWalks()
    # Root 5 at position 10, behind it 6 and 7.
    first = chunk_step(1, [5, 6, 7], [10, 11, 11], [10, 11, 12], [[10], [10, 11], [10, 12]])
    walk = walks.follow(first, 0, targets(7, 0, 8))
    assert walk.rows == [WalkedRow(10, 10, 7), WalkedRow(12, 11, 8)]
    assert (walk.num_known, list(walk.walked), walk.at_leaf) == (0, [2], True)
    # The root is the same; behind 7 come 8 and 9, behind 6 comes 8, and a probe like it.
    second = chunk_step(
        1, [5, 8, 8, 9, 8], [10, 12, 12, 12, 12], [10, 13, 14, 15, 16],
        [[10], [10, 11, 13], [10, 12, 14], [10, 12, 15], [10, 12]], num_probes=1,
    )  # fmt: skip
    walk = walks.follow(second, 0, targets(7, 1, 3, 1))
    assert [row.slot for row in walk.rows] == [10, 12, 14]
    assert (walk.num_known, walk.num_passed, list(walk.walked)) == (2, 0, [2])
    assert walk.at_leaf
    # Root 7 is computed anew in its place; 8 has moved to its own.
    walks.move(np.array([[14, 12]], dtype=np.int32))
    third = chunk_step(1, [7, 4], [11, 13], [11, 17], [[11], [11, 12, 17]])
    walk = walks.follow(third, 0, targets(8, 2))
    assert [row.slot for row in walk.rows] == [11, 12]
    assert (walk.num_known, walk.num_passed, list(walk.walked)) == (2, 1, [])
    # What follows 8 is another token.
    assert not walk.at_leaf
    # Behind a miss the tree is new.
    fourth = chunk_step(1, [3], [13], [13], [[13]])
    walk = walks.follow(fourth, 0, targets(9))
    assert walk.rows == [WalkedRow(13, 13, 9)]
    assert (walk.num_known, walk.num_passed, walk.at_leaf) == (0, 0, False)


def test_those_that_were_walked_longest_ago_are_let_go() -> None:
    gone: list[int] = []
    walks = PipelinedWalks(gone.append)
    for key in (*range(MOST_REQUESTS), 0, MOST_REQUESTS, MOST_REQUESTS + 1):
        walks.follow(chunk_step(key, [5], [10], [10], [[10]]), 0, targets(7))
    assert gone == [1, 2]
    walks.clear()
    walk = walks.follow(chunk_step(0, [5], [10], [10], [[10]]), 0, targets(7))
    assert walk.num_known == 0
