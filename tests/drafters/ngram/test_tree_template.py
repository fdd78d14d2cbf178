"""The static tree of Token Recycling: what each prefix of it promises."""

from itertools import pairwise

import numpy as np
import pytest
from draftline.drafters.ngram.token_recycling import FALL, MAX_TEMPLATE_NODES, SHARE, tree_template
from hypothesis import given
from hypothesis import strategies as st

sizes = st.integers(0, 90)
widths = st.integers(1, 8)


def paths(num_nodes: int, num_candidates: int) -> list[tuple[int, ...]]:
    """Each node as the ranks on its way from the root."""
    found: list[tuple[int, ...]] = [()]
    for parent, rank in tree_template(num_nodes, num_candidates):
        found.append((*found[parent], rank))
    return found[1:]


def value(path: tuple[int, ...]) -> float:
    return float(np.prod([SHARE * (rank + 1.0) ** -FALL for rank in path]))


def test_the_first_nodes() -> None:
    """Second candidates count 2 ** -2.2 = 0.22 of the first, third ones 0.09; a level 0.36."""
    assert paths(8, 8) == [(0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0), (3,)]


def test_as_many_nodes_as_the_paper_has_make_a_tree_like_its_own() -> None:
    """The paper's has 8, 21, 25, 15, 8 and 3 nodes of depths 1 to 6."""
    depths = np.bincount([len(path) for path in paths(80, 8)]).tolist()
    assert depths[1] == 8
    assert depths[1:] == pytest.approx([8, 21, 25, 15, 8, 3], abs=4)


@given(sizes, widths)
def test_nodes_fall_in_value_and_none_stands_before_its_parent_or_better_sibling(
    num_nodes: int, num_candidates: int
) -> None:
    found = paths(num_nodes, num_candidates)
    assert len(found) == len(set(found)) == num_nodes
    values = [value(path) for path in found]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(values))
    for node, path in enumerate(found):
        assert path[-1] < num_candidates
        assert path[:-1] in {(), *found[:node]}
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in found[:node]


@given(sizes, sizes, widths)
def test_a_prefix_is_the_template_of_fewer_nodes(one: int, other: int, width: int) -> None:
    small, large = sorted((one, other))
    assert paths(large, width)[:small] == paths(small, width)


def test_no_template_is_larger_than_the_limit() -> None:
    assert len(tree_template(2**31, 8)) == MAX_TEMPLATE_NODES
