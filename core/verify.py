"""The acceptance walk of coupled sampling (sample-and-match, algorithms.md section 35.3)."""

from __future__ import annotations

from typing import NamedTuple

from . import tree_kernels
from .tree import TokenTree
from .types import ROOT, Int32


class Walk(NamedTuple):
    """The accepted nodes int32 [k], from the root down, and the target's token after the last."""

    path: Int32
    bonus: int


def walk(tree: TokenTree, target_tokens: Int32) -> Walk:
    """Follow the target's own choices through the tree until it leaves it.

    `target_tokens` int32 [nodes + 1] is the target's token after the root (row 0) and after each
    node (row i + 1). Each is a function of the text before it and of noise keyed by position, so
    the committed tokens are those of plain decoding, whatever stands in the tree.
    """
    path = tree_kernels.follow(tree.nodes, target_tokens)
    last = path[-1] if len(path) else ROOT
    return Walk(path, int(target_tokens[last + 1]))
