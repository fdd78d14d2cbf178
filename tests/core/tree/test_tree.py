from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from draftline.core.arrays import ROOT, Int32
from draftline.core.proposals import Proposal, chain_proposal
from draftline.core.request.output import TARGET_SOURCE
from draftline.core.tree.merge import merge, merge_all
from draftline.core.tree.tree import TokenTree, TreeBatch, pack, unpack
from draftline.core.verify.walk import Paths, RowSlots, Walk, follow, walks_along
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 5


def walks(trees: Sequence[TokenTree], targets: Int32) -> list[Walk]:
    """The walks through trees whose rows have the slots 0, 1, 2 and so on."""
    starts = np.cumsum([0, *(len(tree) + 1 for tree in trees)], dtype=np.int32)
    if not trees:
        return []
    batch = TreeBatch.of(trees)
    walked = Paths(*follow(batch.nodes, batch.node_ends, targets))
    slots = RowSlots(starts, np.arange(starts[-1], dtype=np.int32))
    return list(walks_along(walked, batch.names, slots))


def proposal(source: str, nodes: list[tuple[int, int]]) -> Proposal:
    tokens, parents = zip(*nodes, strict=True) if nodes else ((), ())
    return Proposal(
        source,
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.zeros(len(nodes), dtype=np.float32),
    )


@st.composite
def proposals(draw: st.DrawFn) -> list[Proposal]:
    found = []
    for index in range(draw(st.integers(0, 4))):
        size = draw(st.integers(0, 12))
        nodes = [
            (draw(st.integers(0, VOCAB - 1)), draw(st.integers(ROOT, node - 1)))
            for node in range(size)
        ]
        found.append(proposal(f"drafter{index}", nodes))
    return found


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Every node as the tokens from the root down to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def tree_paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return paths(tree.tokens.tolist(), tree.parents.tolist())


def test_merges_by_prefix_in_order_of_priority() -> None:
    first = proposal("spectra", [(7, ROOT), (8, 0), (9, 0)])
    second = proposal("retrieval", [(7, ROOT), (9, 0), (4, 1), (5, ROOT)])
    tree = merge([first, second], max_nodes=10, max_depth=10)
    assert tree.tokens.tolist() == [7, 8, 9, 4, 5]
    assert tree.parents.tolist() == [ROOT, 0, 0, 2, ROOT]
    assert tree.depths.tolist() == [1, 2, 2, 3, 1]
    names = [tree.names[source] for source in tree.sources.tolist()]
    assert names == ["spectra"] * 3 + ["retrieval"] * 2
    assert tree.count_sources() == {"spectra": 3, "retrieval": 2}


def test_a_cut_node_takes_its_descendants_along() -> None:
    chain = chain_proposal("a", np.array([1, 2, 3, 4], dtype=np.int32))
    assert merge([chain], max_nodes=10, max_depth=2).tokens.tolist() == [1, 2]
    other = chain_proposal("b", np.array([9, 8], dtype=np.int32))
    assert merge([chain, other], max_nodes=5, max_depth=9).tokens.tolist() == [1, 2, 3, 4, 9]


@given(proposals(), st.integers(0, 20), st.integers(0, 6))
def test_merge_keeps_the_invariants_and_only_proposed_paths(
    found: list[Proposal], max_nodes: int, max_depth: int
) -> None:
    tree = merge(found, max_nodes, max_depth)
    tree.check()
    assert len(tree) <= max_nodes
    assert tree.depths.max(initial=0) <= max_depth
    proposed = set().union(*(paths(p.tokens.tolist(), p.parents.tolist()) for p in found), set())
    assert tree_paths(tree) <= proposed
    if max_nodes >= 20 * VOCAB or max_nodes >= len(proposed):
        assert tree_paths(tree) == {path for path in proposed if len(path) <= max_depth}


@given(proposals())
def test_mask_row_is_the_root_the_ancestors_and_itself(found: list[Proposal]) -> None:
    tree = merge(found, 64, 64)
    mask = tree.mask()
    for node in range(len(tree)):
        seen = {0, node + 1}
        parent = int(tree.parents[node])
        while parent != ROOT:
            seen.add(parent + 1)
            parent = int(tree.parents[parent])
        assert set(np.flatnonzero(mask[node + 1]).tolist()) == seen
    assert np.flatnonzero(mask[0]).tolist() == [0]


@given(proposals(), st.data())
def test_walk_follows_the_target_until_it_leaves_the_tree(
    found: list[Proposal], data: st.DataObject
) -> None:
    tree = merge(found, 64, 64)
    size = len(tree) + 1
    targets = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    ((rows, tokens, sources, token_ids, moves),) = walks([tree], np.array(targets, dtype=np.int32))
    assert tuple(token_ids.tolist()) == tokens
    assert moves.tolist() == [[row, place] for place, row in enumerate(rows) if row != place]
    assert rows[0] == 0
    path = np.array(rows[1:], dtype=np.int32) - 1
    *accepted, bonus = tokens
    assert accepted == tree.tokens[path].tolist()
    names = [tree.names[i] for i in tree.sources[path].tolist()]
    assert sources == (*names, TARGET_SOURCE)
    node = ROOT
    for step in path:
        assert tree.parents[step] == node
        assert tree.tokens[step] == targets[node + 1]
        node = step
    assert bonus == targets[node + 1]
    pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    assert (node, bonus) not in set(pairs)


@given(st.lists(proposals(), min_size=1, max_size=4), st.data())
def test_many_trees_at_once_are_as_each_alone(
    forest: list[list[Proposal]], data: st.DataObject
) -> None:
    trees = merge_all(forest, [12] * len(forest), [5] * len(forest))
    alone = [merge(found, 12, 5) for found in forest]
    for tree, other in zip(trees, alone, strict=True):
        assert np.array_equal(tree.nodes, other.nodes)
        assert np.array_equal(tree.attributions, other.attributions)
        assert np.array_equal(tree.values, other.values)
    assert np.array_equal(
        trees.ancestors(), np.concatenate([tree.ancestors().ravel() for tree in alone])
    )
    depths = [data.draw(st.integers(0, 5)) for _ in trees]
    kept = [tree.depths <= depth for tree, depth in zip(trees, depths, strict=True)]
    for cut, tree, own in zip(trees.keep(np.concatenate(kept)), trees, kept, strict=True):
        cut.check()
        assert tree_paths(cut) == tree_paths(tree.keep(own))
    token = st.integers(0, VOCAB - 1)
    targets = [
        np.array(data.draw(st.lists(token, min_size=size, max_size=size)), dtype=np.int32)
        for size in (len(tree) + 1 for tree in trees)
    ]
    # What follows the trees' tokens is of others.
    found = walks(trees, np.concatenate([*targets, np.array([1, 2], dtype=np.int32)]))
    first = 0
    for walk, tree, said in zip(found, trees, targets, strict=True):
        (own,) = walks([tree], said)
        assert walk[:3] == own[:3]
        assert np.array_equal(walk.token_ids, own.token_ids)
        assert np.array_equal(walk.moves, own.moves + first)
        first += len(tree) + 1


def test_no_tree_at_all() -> None:
    assert walks([], np.array([3], dtype=np.int32)) == []
    assert len(TreeBatch.of([]).ancestors()) == 0


def test_check_notices_a_broken_tree() -> None:
    tree = merge([proposal("a", [(1, ROOT), (2, 0)])], 9, 9)
    broken = replace(tree, nodes=tree.nodes + np.array([0, 0, 1, 0], dtype=np.int32))
    with pytest.raises(AssertionError):
        broken.check()


@given(st.integers(0, 150), st.integers(0, 150), st.integers(0, 2**32 - 1))
def test_masks_survive_their_bits(rows: int, columns: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((rows, columns)) < 0.5
    bits = pack(mask)
    assert bits.shape == (rows, -(-columns // 64))
    assert np.array_equal(unpack(bits, columns), mask)


def test_trees_of_more_nodes_than_a_word_has_bits() -> None:
    tree = merge([chain_proposal("a", np.arange(200, dtype=np.int32))], 200, 200)
    assert np.array_equal(tree.mask(), np.tri(201, dtype=np.bool_))
