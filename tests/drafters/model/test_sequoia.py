"""Sequoia's tree, from acceptance and times that are measured while it drafts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.drafters.model.draft_costs import DraftCosts
from draftline.drafters.model.sequoia import NUM_RANKS, SequoiaShapes
from draftline.drafters.tree_shape import TreeShape

ACCEPTANCE = np.array([0.5, 0.2, 0.1])


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def judged(acceptance: np.ndarray, count: int = 6000) -> SequoiaShapes:
    """After so many chances of a token that the child of each rank is right so often."""
    shapes, rng = SequoiaShapes(DraftCosts()), np.random.default_rng(1)
    children = ids(*range(len(acceptance)))
    parents = np.full(len(acceptance), ROOT, dtype=np.int32)
    wrong = len(acceptance)
    probs = np.append(acceptance, 1 - acceptance.sum())
    for token in rng.choice(wrong + 1, count, p=probs):
        shapes.judge(children, parents, [int(token)])
    return shapes


def test_acceptance_is_learned_by_rank() -> None:
    assert judged(ACCEPTANCE).acceptance[:3] == pytest.approx(ACCEPTANCE, abs=0.08)


def test_nodes_are_judged_as_far_as_the_text_goes() -> None:
    """7 has the children 1, 2; 2 has 5. The text says 7 2 6: 5 is wrong, and 9 beside 7 was."""
    shapes = SequoiaShapes(DraftCosts())
    before = shapes.acceptance
    tree = ids(7, 9, 1, 2, 5), ids(ROOT, ROOT, 0, 0, 3)
    for _ in range(500):
        shapes.judge(*tree, [7, 2, 6])
    first, second, third = shapes.acceptance[:3]
    # Of rank 0: 7 right, 1 and 5 wrong; of rank 1: 9 wrong, 2 right.
    assert first == pytest.approx(1 / 3, abs=0.02)
    assert second == pytest.approx(1 / 2, abs=0.02)
    assert third == before[2], "nothing had such a child"


def drawn_with(shapes: SequoiaShapes, node_s: float, draw_s: float) -> TreeShape:
    """The shape where a verification takes 1 s and so much more for a node, a pass `draw_s`."""
    shapes._costs.draw_s = draw_s
    for nodes in list(range(0, 33)) * 4:
        shapes.note_verify(nodes, 1.0 + node_s * nodes)
    return shapes.shape(32, 6)


def test_size_and_depth_follow_what_nodes_and_passes_take() -> None:
    shapes = judged(ACCEPTANCE, 2000)
    free = drawn_with(shapes, 0.0, 0.0)
    dear_nodes = drawn_with(judged(ACCEPTANCE, 2000), 0.1, 0.0)
    dear_passes = drawn_with(judged(ACCEPTANCE, 2000), 0.0, 0.15)
    assert len(free) == 32
    assert len(dear_nodes) < 8
    assert dear_passes.depth < free.depth
    assert len(dear_passes) == 32


def test_a_full_tree_has_all_nodes_whatever_they_take() -> None:
    shapes = SequoiaShapes(DraftCosts(), is_full=True)
    assert len(drawn_with(shapes, 50.0, 50.0)) == 32


def test_it_drafts_a_node_at_least_whatever_that_takes() -> None:
    assert len(drawn_with(judged(ACCEPTANCE, 500), 50.0, 50.0)) == 1


def expected(shape: TreeShape, acceptance: np.ndarray) -> float:
    """Accepted nodes on average, each of its path's probability."""
    value = {ROOT: 1.0}
    for node, (parent, rank) in enumerate(
        zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True)
    ):
        value[node] = value[parent] * float(acceptance[rank])
    return sum(value.values()) - 1.0


def test_the_shape_is_the_best_of_its_size() -> None:
    """Every tree of four nodes, by hand: each node's parent and rank."""
    shapes = judged(ACCEPTANCE, 2000)
    acceptance = shapes.acceptance
    found = drawn_with(shapes, 0.0, 0.0)
    found = shapes.shape(4, 4)
    best = 0.0
    for parents in product(range(-1, 3), repeat=4):
        if any(parent >= node for node, parent in enumerate(parents)):
            continue
        counts: dict[int, int] = {}
        ranks = []
        for parent in parents:
            ranks.append(counts.get(parent, 0))
            counts[parent] = ranks[-1] + 1
        if max(ranks) >= NUM_RANKS:
            continue
        shape = TreeShape(ids(*parents), ids(*ranks), ids(*range(4)))
        best = max(best, expected(shape, acceptance))
    assert expected(found, acceptance) == pytest.approx(best)
