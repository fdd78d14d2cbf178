"""Acceptance estimates, learned from the tokens that a step committed.

Under `coupled` the target's next tokens depend on nothing that was drafted. So of each node that
the text came to, all drafted children are right or wrong, also those that were not verified. Nodes
one level below what was verified count, too: a drafter that proves right there gets deeper trees.
"""

from __future__ import annotations

from ..arrays import Float32, Float64, Int32, Int64
from ..compiled import compiled
from ..tree.acceptance import AcceptanceTable, record
from ..tree.tree import DRAFTED_DEPTH, DRAFTER, NODE, PARENT, RANK, TOKEN, TreeBatch
from ..verify.walk import Paths


def learn_from_tokens(table: AcceptanceTable, drafted: TreeBatch, paths: Paths) -> None:
    """Record which nodes of the trees, as drafted, were right.

    paths: the tokens that were committed behind the root of each
    """
    _learn(
        drafted.nodes, drafted.attributions, drafted.attribution_log_probs, drafted.ends,
        paths.tokens, paths.ends, table.counts,
    )  # fmt: skip


@compiled
def _learn(
    nodes: Int32,
    attributions: Int32,
    log_probs: Float32,
    ends: Int64,
    tokens: Int32,
    token_ends: Int64,
    counts: Float64,
) -> None:
    first, first_said, first_token = 0, 0, 0
    for tree in range(ends.shape[1]):
        own, at = nodes[first : ends[0, tree]], -1
        for token in tokens[first_token : token_ends[tree]]:
            right = -1
            for node in range(at + 1, len(own)):
                if own[node, PARENT] == at and own[node, TOKEN] == token:
                    right = node
            for index in range(first_said, ends[1, tree]):
                node = attributions[index, NODE]
                if own[node, PARENT] == at:
                    drafter, rank = attributions[index, DRAFTER], attributions[index, RANK]
                    depth = attributions[index, DRAFTED_DEPTH]
                    record(counts, drafter, log_probs[index], depth, rank, node == right)
            if right < 0:
                break
            at = right
        first, first_said, first_token = ends[0, tree], ends[1, tree], token_ends[tree]
