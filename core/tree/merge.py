"""Merges all drafters' proposals in one token tree a request.

See docs/algorithms/token_trees.md, "Merging proposals".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from ..proposals import Proposal
from . import kernels as tree_kernels
from .acceptance_table import AcceptanceTable
from .tree import NO_TREE, TokenTree

NO_COUNTS = AcceptanceTable().counts


def merge(
    proposals: Sequence[Proposal],
    max_nodes: int,
    max_depth: int,
    table: AcceptanceTable | None = None,
) -> TokenTree:
    """`merge_all` for one request."""
    (tree,) = merge_all([proposals], [max_nodes], [max_depth], table)
    return tree


def merge_all(
    requests: Sequence[Sequence[Proposal]],
    max_nodes: Sequence[int],
    max_depths: Sequence[int],
    table: AcceptanceTable | None = None,
) -> list[TokenTree]:
    """Merge each request's proposals by prefix, in order of priority, under its node budget.

    Earlier proposals buy their nodes first, so that internal guesses come before external ones
    (SPECTRA, Algorithm 1). A node that is already there costs nothing. What exceeds a request's
    most nodes or depth is cut, with its descendants. `table` estimates what a node is worth, by the
    highest of the drafters that proposed it; without it all are worth the same.
    """
    found = list(chain.from_iterable(requests))
    if not found:
        return [NO_TREE] * len(requests)
    ids = table if table is not None else AcceptanceTable()
    sources = [ids.source_id(proposal.source) for proposal in found]
    ends = list(accumulate(len(proposal.tokens) for proposal in found))
    request_ends = list(accumulate(map(len, requests)))
    nodes, values, attributions, log_probs, sizes = tree_kernels.merge_nodes(
        np.concatenate([proposal.tokens for proposal in found]),
        np.concatenate([proposal.parents for proposal in found]),
        np.concatenate([proposal.log_probs for proposal in found]),
        np.array(ends, dtype=np.int64),
        np.array(sources, dtype=np.int32),
        np.array(request_ends, dtype=np.int64),
        np.array(max_nodes, dtype=np.int64),
        np.array(max_depths, dtype=np.int64),
        ids.counts if table is not None else NO_COUNTS,
    )
    firsts = [0, *ends]
    starts = [firsts[end] for end in (0, *request_ends[:-1])]
    return [
        TokenTree(
            nodes[start : start + num_nodes],
            values[start : start + num_nodes],
            attributions[start : start + num_attributions],
            log_probs[start : start + num_attributions],
            ids.names,
        )
        for start, num_nodes, num_attributions in zip(starts, *sizes.tolist(), strict=True)
    ]
