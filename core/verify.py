"""The acceptance walk of coupled sampling (sample-and-match, algorithms.md section 35.3)."""

from __future__ import annotations

from typing import NamedTuple

from . import tree_kernels
from .output import TARGET_SOURCE
from .tree import TokenTree
from .types import Int32


class Walk(NamedTuple):
    """What is committed.

    rows     int32 [k + 1]  of the tree's step: the root's, then those of the k accepted nodes
    tokens   the target's tokens after these rows: those of the nodes, and the bonus token
    sources  whom they are from: drafters, and the target
    """

    rows: Int32
    tokens: list[int]
    sources: list[str]


def walk(tree: TokenTree, target_tokens: Int32) -> Walk:
    """Follow the target's own choices through the tree until it leaves it.

    `target_tokens` int32 [nodes + 1] is the target's token after the root (row 0) and after each
    node (row i + 1). Each is a function of the text before it and of noise keyed by position, so
    the committed tokens are those of plain decoding, whatever stands in the tree.
    """
    found = tree_kernels.follow(tree.nodes, target_tokens)
    _, tokens, sources = found.tolist()
    names = [tree.names[source] for source in sources[:-1]]
    return Walk(found[0], tokens, [*names, TARGET_SOURCE])
