"""The acceptance walk of coupled sampling (sample-and-match, algorithms.md section 35.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import tree_kernels
from .output import TARGET_SOURCE
from .tree import TokenTree, count_sources, node_ends, stacked_nodes
from .types import Int32


class Walk(NamedTuple):
    """What is committed.

    rows     of the tree's step: the root's, then those of the k accepted nodes
    tokens   k + 1, the target's tokens after these rows: those of the nodes, and the bonus token
    sources  whom they are from: drafters, and the target
    drafted  how many of the tree's nodes each drafter proposed first
    """

    rows: list[int]
    tokens: list[int]
    sources: list[str]
    drafted: dict[str, int]


def walk_all(trees: Sequence[TokenTree], target_tokens: Int32) -> list[Walk]:
    """Follow the target's own choices through each tree until they leave it.

    `target_tokens` int32 holds, tree by tree, the target's token after the root and after each
    node. Each is a function of the text before it and of noise keyed by position, so the committed
    tokens are those of plain decoding, whatever stands in the tree.
    """
    if not trees:
        return []
    found, ends = tree_kernels.follow(stacked_nodes(trees), node_ends(trees), target_tokens)
    rows, tokens, sources = found.tolist()
    walks, first = [], 0
    for tree, end, drafted in zip(trees, ends.tolist(), count_sources(trees), strict=True):
        names = [tree.names[source] for source in sources[first : end - 1]]
        walks.append(Walk(rows[first:end], tokens[first:end], [*names, TARGET_SOURCE], drafted))
        first = end
    return walks
