"""Penalties of the rows of one request: tokens of its text, and of each row's own path."""

from __future__ import annotations

import numpy as np

from ..arrays import Int32
from ..compiled import compiled
from ..logits_params import LogitsParams
from ..request.token_counts import TokenCounts
from ..steps import Penalties
from ..tree.kernels import PARENT
from ..tree.tree import TokenTree


def penalties_of(params: LogitsParams, counts: TokenCounts, tree: TokenTree) -> Penalties:
    """The penalties of the rows after the root and after each node.

    Tokens that only stand in the tree count where they are on a row's path.
    """
    tokens, times, places = counts.beside(tree.tokens.tolist())
    rows, nodes = path_entries(tree.nodes)
    in_prompt = np.zeros(len(tokens), dtype=np.bool_)
    in_prompt[: counts.num_in_prompt] = True
    return Penalties(
        tokens=tokens,
        counts=times,
        in_prompt=in_prompt,
        path_rows=rows,
        path_tokens=places[nodes],
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


@compiled
def path_entries(nodes: Int32) -> tuple[Int32, Int32]:
    """For every node of a tree, its row and each node from it up to the root, two int32 [entries].

    `nodes` as in `TokenTree`.
    """
    depths = np.zeros(len(nodes), dtype=np.int64)
    for node in range(len(nodes)):
        parent = nodes[node, PARENT]
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
    rows = np.empty(depths.sum(), dtype=np.int32)
    entries = np.empty(len(rows), dtype=np.int32)
    done = 0
    for node in range(len(nodes)):
        above = node
        while above >= 0:
            rows[done], entries[done] = node + 1, above
            above = nodes[above, PARENT]
            done += 1
    return rows, entries
