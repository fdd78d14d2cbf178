"""Static trees: files' forms, SpecInfer's widths, and Sequoia's programme against all trees."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.errors import ConfigError
from draftline.drafters.tree_shape import (
    TreeShape,
    fastest_shape_of_sequoia,
    read_tree_shape,
    shape_of_paths,
    shape_of_sequoia,
    shape_of_widths,
)
from hypothesis import given
from hypothesis import strategies as st

Path_ = tuple[int, ...]


def paths_of(shape: TreeShape) -> list[Path_]:
    found: list[Path_] = []
    for parent, rank in zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), rank))
    assert [len(path) for path in found] == shape.depths.tolist()
    return found


def test_paths_bring_what_lies_on_them() -> None:
    shape = shape_of_paths([[0, 1], [2], [0]])
    assert paths_of(shape) == [(0,), (2,), (0, 1)]
    assert (len(shape), shape.depth, shape.num_candidates) == (3, 2, 3)
    assert len(shape_of_paths([])) == 0


def test_widths_are_specinfers_expansion() -> None:
    assert paths_of(shape_of_widths([2, 1, 2])) == [
        (0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        [[0], [1], [0, 0]],
        {"choices": [[0, 0], [1]]},
        {"Successors": [[1, 2], [3], [], []], "depth": [0, 1, 1, 2]},
    ],
)
def test_files_of_medusa_eagle_and_sequoia(tmp_path: Path, data: object) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(data))
    assert paths_of(read_tree_shape(file)) == [(0,), (1,), (0, 0)]


@pytest.mark.parametrize(
    "text",
    ["", "3", "{}", "[[-1]]", '[["a"]]', "[[]]", '{"widths": [0]}', '{"widths": [40, 40]}',
     '{"Successors": 3}'],
)  # fmt: skip
def test_what_is_no_tree_is_refused_with_the_file_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"tree\.json"):
        read_tree_shape(file)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_tree_shape(tmp_path / "missing.json")


@pytest.mark.parametrize("successors", [[[0]], [[1], [1]], [[5]]])
def test_a_growth_map_that_is_no_tree_is_refused(tmp_path: Path, successors: list[object]) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"Successors": successors}))
    with pytest.raises(ConfigError, match=r"tree\.json .* is no child of node \d+ alone"):
        read_tree_shape(file)


@cache
def trees_of(num_nodes: int, max_depth: int, max_children: int) -> list[frozenset[Path_]]:
    """Every tree whose nodes have children of ranks without gaps."""
    if max_depth == 0 or num_nodes == 0:
        return [frozenset()] if num_nodes == 0 else []
    found = []
    for children in range(1, min(max_children, num_nodes) + 1):
        for sizes in product(range(num_nodes), repeat=children):
            if sum(sizes) != num_nodes - children:
                continue
            below = [trees_of(size, max_depth - 1, max_children) for size in sizes]
            for parts in product(*below):
                nodes = {(rank,) for rank in range(children)}
                for rank, part in enumerate(parts):
                    nodes |= {(rank, *path) for path in part}
                found.append(frozenset(nodes))
    return found


def value_of(paths: frozenset[Path_], acceptance: list[float]) -> float:
    return sum(float(np.prod([acceptance[rank] for rank in path])) for path in paths)


probabilities = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=3)


@given(probabilities, st.integers(1, 6), st.integers(1, 4))
def test_sequoia_is_the_best_of_all_trees(
    acceptance: list[float], num_nodes: int, max_depth: int
) -> None:
    shape, value = shape_of_sequoia(acceptance, num_nodes, max_depth)
    paths = frozenset(paths_of(shape))
    assert shape.depth <= max_depth
    assert value == pytest.approx(value_of(paths, acceptance))
    every = trees_of(len(shape), max_depth, len(acceptance))
    assert paths in every
    best = max(value_of(other, acceptance) for other in every)
    assert value == pytest.approx(best)
    if len(shape) < num_nodes:
        assert not trees_of(len(shape) + 1, max_depth, len(acceptance))


def test_sequoia_by_hand() -> None:
    # 0.5, then 0.4 beside it, then 0.25 below the first.
    assert paths_of(shape_of_sequoia([0.5, 0.4], 3, 2)[0]) == [(0,), (1,), (0, 0)]
    assert shape_of_sequoia([0.5, 0.4], 3, 2)[1] == pytest.approx(1.15)
    # A chain where the second choice is never right.
    assert paths_of(shape_of_sequoia([0.9, 0.0], 3, 8)[0]) == [(0,), (0, 0), (0, 0, 0)]


def test_a_tree_is_as_large_as_the_hardware_wants_it() -> None:
    acceptance = [0.8, 0.1]
    free = fastest_shape_of_sequoia(acceptance, 12, 4, lambda _nodes, _depth: 1.0)
    assert paths_of(free) == paths_of(shape_of_sequoia(acceptance, 12, 4)[0])
    dear = fastest_shape_of_sequoia(acceptance, 12, 4, lambda nodes, _depth: 1.0 + nodes)
    assert not len(dear)
    found = fastest_shape_of_sequoia(acceptance, 12, 4, lambda nodes, _depth: 1 + 0.05 * nodes)
    assert 1 < len(found) < 12
    assert found.depth == min(len(found), 4)


def test_bad_acceptance_is_refused() -> None:
    for acceptance in ([], [1.5], [float("nan")]):
        with pytest.raises(ConfigError, match="acceptance"):
            shape_of_sequoia(acceptance, 3, 3)
