"""Trees grown level by level, by hand and against a distribution whose every path is known."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.proposals import Proposal
from draftline.drafters.model.expansion import (
    BestFirstExpansion,
    DynamicExpansion,
    Expansion,
    StaticExpansion,
)
from draftline.drafters.tree_shape import shape_of_paths, shape_of_widths
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 4
Path = tuple[int, ...]


def path_of(expansion: Expansion, node: int) -> Path:
    path: list[int] = []
    while node != ROOT:
        path.append(expansion.tokens[node])
        node = expansion.parents[node]
    return tuple(path[::-1])


def distribution(path: Path, seed: int) -> np.ndarray:
    """Log-probabilities of a small vocabulary after a path."""
    weights = np.random.default_rng([seed, *path]).exponential(size=VOCAB)
    return np.log(weights / weights.sum())


def grown(expansion: Expansion, seed: int) -> Expansion:
    while expansion.frontier:
        distributions = [
            distribution(path_of(expansion, node), seed) for node in expansion.frontier
        ]
        ids = [
            np.argsort(-one, kind="stable")[: expansion.num_candidates].tolist()
            for one in distributions
        ]
        expansion.grow(
            ids, [one[own].tolist() for one, own in zip(distributions, ids, strict=True)]
        )
    return expansion


def proposed(expansion: Expansion, max_nodes: int) -> list[tuple[Path, float]]:
    tokens, parents, log_probs = expansion.best(max_nodes)
    Proposal("test", tokens, parents, log_probs).check(99)
    paths: list[Path] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return list(zip(paths, log_probs.tolist(), strict=True))


def test_two_levels_by_hand() -> None:
    expansion = DynamicExpansion(top_k=2, depth=2, max_nodes=4)
    expansion.grow([[7, 8]], [[math.log(0.6), math.log(0.3)]])
    assert expansion.reach == pytest.approx(0.9)
    assert expansion.frontier == [0, 1]
    expansion.grow([[1, 2], [3, 4]], [[math.log(0.4), math.log(0.1)], [math.log(0.9), -9.0]])
    assert expansion.frontier == []
    # 7: 0.6, 8: 0.3, 8 3: 0.27, 7 1: 0.24, 7 2: 0.06.
    found = proposed(expansion, 4)
    assert [path for path, _ in found] == [(7,), (8,), (8, 3), (7, 1)]
    assert found[2][1] == pytest.approx(math.log(0.9))


def test_of_a_certain_path_the_beginning_is_kept() -> None:
    expansion = DynamicExpansion(top_k=1, depth=4, max_nodes=2)
    for token in (5, 6, 7, 8):
        expansion.grow([[token]], [[0.0]])
    assert [path for path, _ in proposed(expansion, 2)] == [(5,), (5, 6)]


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 12), st.integers(0, 99))
def test_a_dynamic_tree_is_the_best_of_all_paths_where_it_is_wide_enough(
    top_k: int, depth: int, max_nodes: int, seed: int
) -> None:
    found = proposed(grown(DynamicExpansion(top_k, depth, max_nodes), seed), max_nodes)
    scores = {
        path: sum(distribution(path[:k], seed)[path[k]] for k in range(len(path)))
        for length in range(1, depth + 1)
        for path in product(range(VOCAB), repeat=length)
    }
    for path, log_prob in found:
        assert log_prob == pytest.approx(distribution(path[:-1], seed)[path[-1]], abs=1e-5)
    best = sorted(scores, key=lambda path: -scores[path])[:max_nodes]
    # What is not expanded would not have been proposed.
    if max_nodes:
        assert found == proposed(grown(DynamicExpansion(top_k, depth, 999), seed), max_nodes)
    # Among the top_k best of all, no path has a beginning that a level of top_k would drop.
    if max_nodes <= top_k:
        assert {path for path, _ in found} == set(best)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=6),
    st.integers(0, 20),
    st.integers(0, 99),
)
def test_a_static_tree_has_its_shape(choices: list[list[int]], max_nodes: int, seed: int) -> None:
    shape = shape_of_paths(choices)
    expansion = grown(StaticExpansion(shape), seed)
    assert len(expansion.tokens) == len(shape)
    ranks = {()} | {tuple(path[: length + 1]) for path in choices for length in range(len(path))}
    nodes = range(len(expansion.tokens))
    assert {_ranks(path_of(expansion, node), seed) for node in nodes} | {()} == ranks
    assert len(proposed(expansion, max_nodes)) == min(max_nodes, len(shape))


def _ranks(path: Path, seed: int) -> Path:
    orders = [
        np.argsort(-distribution(path[:k], seed), kind="stable").tolist() for k in range(len(path))
    ]
    return tuple(order.index(token) for order, token in zip(orders, path, strict=True))


def test_a_drafter_with_few_candidates_makes_a_smaller_tree() -> None:
    expansion = StaticExpansion(shape_of_widths([3, 2]))
    expansion.grow([[4]], [[-0.1]])
    expansion.grow([[5, 6]], [[-0.2, -0.3]])
    assert expansion.frontier == []
    assert [path for path, _ in proposed(expansion, 9)] == [(4,), (4, 5), (4, 6)]


def test_nothing_is_asked_where_nothing_may_grow() -> None:
    assert not DynamicExpansion(3, 0, 9).frontier
    assert not StaticExpansion(shape_of_paths([])).frontier
    assert not BestFirstExpansion(3, 0).frontier
    assert not BestFirstExpansion(0, 3).frontier


def best_first(levels: list[list[float]], most: int) -> BestFirstExpansion:
    """Token k of level d is 10 d + k; all candidates of a level are known at once."""
    expansion = BestFirstExpansion(most, len(levels))
    for depth, log_probs in enumerate(levels):
        [node] = expansion.frontier
        assert expansion.depth(node) == depth
        kept = sorted(log_probs, reverse=True)[: expansion.num_candidates]
        expansion.grow([[10 * depth + k for k in range(len(kept))]], [kept])
    assert not expansion.frontier
    return expansion


LEVELS = st.lists(
    # Few values, so that ties are frequent, and certain ones, whose children tie with them.
    st.lists(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0]), min_size=1, max_size=4),
    min_size=1, max_size=4,
)  # fmt: skip


@given(LEVELS, st.integers(0, 12))
def test_the_best_of_all_prefixes_are_found(levels: list[list[float]], max_nodes: int) -> None:
    found = paths_of_levels(best_first(levels, most=12), max_nodes)
    levels = [sorted(level, reverse=True) for level in levels]
    scores = {
        ranks: sum(level[rank] for level, rank in zip(levels, ranks, strict=False))
        for length in range(1, len(levels) + 1)
        for ranks in product(*(range(len(level)) for level in levels[:length]))
    }
    assert len(found) == len(set(found)) == min(max_nodes, len(scores))
    # Which of equals are taken is free, their scores are not.
    best = sorted(scores.values(), reverse=True)[:max_nodes]
    assert [scores[ranks] for ranks in found] == best


def paths_of_levels(expansion: Expansion, max_nodes: int) -> list[Path]:
    """Ranks along each node's path; `proposed` checks that parents come before children."""
    return [
        tuple(token - 10 * depth for depth, token in enumerate(path))
        for path, _ in proposed(expansion, max_nodes)
    ]


@given(LEVELS, st.integers(1, 12))
def test_no_more_candidates_are_asked_for_than_nodes(
    levels: list[list[float]], max_nodes: int
) -> None:
    few = paths_of_levels(best_first(levels, most=max_nodes), max_nodes)
    assert few == paths_of_levels(best_first(levels, most=99), max_nodes)


def test_a_level_without_candidates_ends_the_tree() -> None:
    expansion = BestFirstExpansion(4, 3)
    expansion.grow([[7, 8]], [[-0.1, -2.0]])
    expansion.grow([[]], [[]])
    assert not expansion.frontier
    assert [path for path, _ in proposed(expansion, 9)] == [(7,), (8,)]
