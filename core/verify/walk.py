"""What is committed of each tree: the acceptance walk of coupled sampling, or a rule's verification
result.

Why the walk gives the text of plain decoding: docs/algorithms/sampling.md and verification.md,
"Coupled walk".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..arrays import Int32
from ..request.output import TARGET_SOURCE
from ..steps import StepOutput, VerificationResult
from ..tree import kernels as tree_kernels
from ..tree.tree import TokenTree, count_sources, node_ends, stacked_nodes


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


def walks_of(trees: Sequence[TokenTree], output: StepOutput) -> list[Walk]:
    """What is committed of a step's trees, which stand first in it."""
    if output.verification_results is None:
        return walk_all(trees, output.target_tokens)
    return _as_decided(trees, output.verification_results)


def _as_decided(
    trees: Sequence[TokenTree], verification_results: Sequence[VerificationResult]
) -> list[Walk]:
    walks = []
    for tree, (path, token), drafted in zip(
        trees, verification_results, count_sources(trees), strict=True
    ):
        tokens = tree.tokens[path].tolist() if path else []
        sources = [tree.names[source] for source in tree.sources[path].tolist()] if path else []
        rows = [0, *(node + 1 for node in path)]
        walks.append(Walk(rows, [*tokens, token], [*sources, TARGET_SOURCE], drafted))
    return walks


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
