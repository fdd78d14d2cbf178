"""Merges all drafters' proposals in one token tree a request.

See docs/how-it-works.md, "Merging proposals".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from ..arrays import ROOT, Float32, Float64, Int32, Int64
from ..compiled import compiled
from ..proposals import Probe, Proposal
from .acceptance import AcceptanceTable, estimate
from .tree import (
    DEPTH,
    DRAFTED_DEPTH,
    DRAFTER,
    NODE,
    PARENT,
    RANK,
    SOURCE,
    TOKEN,
    TokenTree,
    TreeBatch,
    empty_trees,
)

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
) -> TreeBatch:
    """Merge each request's proposals by prefix, in order of priority, under its node budget.

    Earlier proposals buy their nodes first, so that internal guesses come before external ones
    (SPECTRA, Algorithm 1). A node that is already there costs nothing. What exceeds a request's
    most nodes or depth is cut, with its descendants. `table` estimates what a node is worth, by the
    highest of the drafters that proposed it; without it all are worth the same.
    """
    proposals = list(chain.from_iterable(requests))
    if not proposals:
        return empty_trees(len(requests))
    ids = table if table is not None else AcceptanceTable()
    names = [proposal.source for proposal in proposals]
    # In the order of the first of each: numbers are given as names come.
    source_ids = {name: ids.source_id(name) for name in dict.fromkeys(names)}
    return TreeBatch(
        *merge_nodes(
            np.concatenate([proposal.tokens for proposal in proposals]),
            np.concatenate([proposal.parents for proposal in proposals]),
            np.concatenate([proposal.log_probs for proposal in proposals]),
            np.array([len(proposal.tokens) for proposal in proposals], dtype=np.int64).cumsum(),
            np.array([source_ids[name] for name in names], dtype=np.int32),
            np.array(list(map(len, requests)), dtype=np.int64).cumsum(),
            np.array(max_nodes, dtype=np.int64),
            np.array(max_depths, dtype=np.int64),
            ids.counts if table is not None else NO_COUNTS,
        ),
        ids.names,
    )


# Stands for the parent of nodes that had no room.
CUT = ROOT - 1


@compiled
def merge_nodes(  # noqa: PLR0917 - flat arrays, and one loop over them
    tokens: Int32,
    parents: Int32,
    log_probs: Float32,
    ends: Int64,
    sources: Int32,
    request_ends: Int64,
    max_nodes: Int64,
    max_depths: Int64,
    counts: Float64,
) -> tuple[Int32, Float64, Int32, Float32, Int64]:
    """Merge the proposals of each request, whose arrays stand one behind the other.

    `ends` is int64 [proposals], where each ends in the arrays; `sources` int32 [proposals];
    `request_ends` int64 [requests], where each request's proposals end; `counts` of an
    `AcceptanceTable`: without drafters every node is worth the same.

    Gives int32 [n, 4] nodes (token, parent, depth, source), float64 [n] values, int32 [m, 4]
    attributions, float32 [m] their log-probabilities, int64 [2, requests] where each tree's end.
    """
    size = len(tokens)
    nodes, values = np.empty((size, 4), dtype=np.int32), np.zeros(size, dtype=np.float64)
    attributions = np.empty((size, 4), dtype=np.int32)
    attribution_log_probs = np.empty(size, dtype=np.float32)
    tree_ends = np.zeros((2, len(request_ends)), dtype=np.int64)
    # Of the proposals' nodes: the tree's node or CUT, and how many children came so far. The root's
    # stand at the end.
    placed, num_children = np.empty(size + 1, dtype=np.int32), np.zeros(size + 1, dtype=np.int32)
    placed[size] = ROOT
    # Of the tree's nodes: the newest child, of the root first; and the child before it.
    newest, before = np.empty(size + 1, dtype=np.int32), np.empty(size, dtype=np.int32)
    proposal, start, end, used = 0, 0, 0, 0
    for request in range(len(request_ends)):
        first, count, tree = end, 0, nodes[end:]
        newest[0] = ROOT
        while proposal < request_ends[request]:
            source = sources[proposal]
            num_children[size] = 0
            for index in range(start, ends[proposal]):
                own_parent = size if parents[index] == ROOT else start + parents[index]
                rank, parent = num_children[own_parent], placed[own_parent]
                num_children[own_parent] += 1
                room = max_nodes[request], max_depths[request]
                node = _place(tree, newest, before, count, parent, tokens[index], source, room)
                placed[index] = node
                if node == CUT:
                    continue
                count = max(count, node + 1)
                depth = nodes[first + node, DEPTH]
                row = attributions[used]
                row[NODE], row[DRAFTER], row[RANK], row[DRAFTED_DEPTH] = node, source, rank, depth
                attribution_log_probs[used] = log_probs[index]
                used += 1
                above = 1.0 if parent == ROOT else float(values[first + parent])
                value = _value(counts, above, source, log_probs[index], depth, rank)
                values[first + node] = max(values[first + node], value)
            start, proposal = ends[proposal], proposal + 1
        end = first + count
        tree_ends[0, request], tree_ends[1, request] = end, used
    return nodes[:end], values[:end], attributions[:used], attribution_log_probs[:used], tree_ends


@compiled
def _place(
    nodes: Int32,
    newest: Int32,
    before: Int32,
    count: int,
    parent: int,
    token: int,
    source: int,
    room: tuple[int, int],
) -> int:
    """The node of `token` after `parent`, made where there is none yet; CUT where it has no room.

    nodes   of one tree, which has `count`
    newest  of the root and of each node the newest child, and `before` of each node the child of
            its parent that came before it; ROOT: none
    room    most nodes, largest depth
    """
    if parent == CUT:
        return CUT
    child = newest[parent + 1]
    while child != ROOT:
        if nodes[child, TOKEN] == token:
            return int(child)
        child = before[child]
    depth = 1 if parent == ROOT else nodes[parent, DEPTH] + 1
    if count >= room[0] or depth > room[1]:
        return CUT
    row = nodes[count]
    row[TOKEN], row[PARENT], row[DEPTH], row[SOURCE] = token, parent, depth, source
    before[count], newest[parent + 1], newest[count + 1] = newest[parent + 1], count, ROOT
    return count


@compiled
def _value(
    counts: Float64, above: float, source: int, log_prob: float, depth: int, rank: int
) -> float:
    """The probability that the target goes through a node, `above` being that of its parent."""
    if not len(counts):
        return 1.0
    return above * estimate(counts, source, log_prob, depth, rank)


class ProposalTrie:
    """A forest of at most `max_nodes` tokens; equal prefixes share their nodes.

    Nodes stand in the order in which they were added, so sequences belong in falling preference.
    """

    __slots__ = ("_max_nodes", "_nodes", "_parents", "_tokens")

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether no further node has room."""
        return len(self._tokens) >= self._max_nodes

    def add(self, sequence: Iterable[int]) -> int:
        """Merge a path that starts below the root, as far as there is room.

        Returns the number of nodes that are new.
        """
        # Local names: a drafter adds up to all nodes of all requests between two steps.
        tokens, parents, nodes, most = self._tokens, self._parents, self._nodes, self._max_nodes
        before, parent = len(tokens), ROOT
        for token in sequence:
            node = nodes.get((parent, token))
            if node is None:
                node = len(tokens)
                if node >= most:
                    break
                nodes[parent, token] = node
                tokens.append(token)
                parents.append(parent)
            parent = node
        return len(tokens) - before

    def add_all(self, sequences: Iterable[Iterable[int]]) -> None:
        """Merge paths in order for as long as there is room."""
        for sequence in sequences:
            self.add(sequence)
            if self.is_full:
                break

    def proposal(self, source: str, probe: Probe | None = None) -> Proposal:
        """The nodes so far, their probabilities unknown."""
        return Proposal(
            source,
            np.array(self._tokens, dtype=np.int32),
            np.array(self._parents, dtype=np.int32),
            np.zeros(len(self._tokens), dtype=np.float32),
            probe,
        )


def cut(proposal: Proposal, max_nodes: int) -> Proposal:
    """At most so many nodes of a proposal, the first ones."""
    if len(proposal.tokens) <= max_nodes:
        return proposal
    declared = proposal.distributions
    return replace(
        proposal,
        tokens=proposal.tokens[:max_nodes],
        parents=proposal.parents[:max_nodes],
        log_probs=proposal.log_probs[:max_nodes],
        distributions=None if declared is None else declared.rows(slice(max_nodes)),
    )


def reroot(proposal: Proposal, tokens: Int32) -> Proposal | None:
    """What is left of a proposal after `tokens` int32 [k] were committed to its base text.

    The nodes below the paths that spell `tokens`, in their order; where siblings repeat a token,
    the nodes below each of them. None where nothing is left. The probe goes: its rows and
    positions belong to the old root; `num_top_next_tokens`, which is about any tree, stays. With
    k = 0 the proposal itself.
    """
    if len(tokens) == 0:
        return proposal
    path = tokens.tolist()
    # Tokens of the path that a node's own path spells; -1 once it left the path.
    matched: list[int] = []
    new_index: list[int] = []
    kept: list[int] = []
    parents: list[int] = []
    for node, (token, parent) in enumerate(
        zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True)
    ):
        depth = 0 if parent == ROOT else matched[parent]
        new_parent = ROOT if parent == ROOT else new_index[parent]
        is_kept = depth == len(path)
        is_on_path = 0 <= depth < len(path) and path[depth] == token
        matched.append(depth if is_kept else depth + 1 if is_on_path else -1)
        new_index.append(len(kept) if is_kept else ROOT)
        if is_kept:
            kept.append(node)
            parents.append(new_parent)
    if not kept and not proposal.num_top_next_tokens:
        return None
    return Proposal(
        proposal.source,
        proposal.tokens[kept],
        np.array(parents, dtype=np.int32),
        proposal.log_probs[kept],
        num_top_next_tokens=proposal.num_top_next_tokens,
        distributions=None if proposal.distributions is None else proposal.distributions.rows(kept),
    )
