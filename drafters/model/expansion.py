"""Trees that a drafter grows level by level from its own most probable candidates.

See docs/drafters.md, "Model trees".
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp
from typing import Protocol

import numpy as np

from ...core.arrays import ROOT, Float32, Int32
from ..tree_shape import TreeShape


class Expansion(Protocol):
    """A tree on its way: which nodes to compute next, and their candidates."""

    @property
    def num_candidates(self) -> int:
        """Number of candidates that `grow` takes after a node."""
        ...

    @property
    def frontier(self) -> Sequence[int]:
        """Nodes whose candidates `grow` takes next; the root alone at first, none at the end."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids of all nodes so far, in the order in which they were added."""
        ...

    @property
    def parents(self) -> Sequence[int]:
        """Parents of all nodes so far, as indices of nodes; -1 is the root."""
        ...

    @property
    def most_fed(self) -> int:
        """Upper bound of the nodes that the model is run on, the root not counted."""
        ...

    def depth(self, node: int) -> int:
        """Depth of a node so far; 0 for the root."""
        ...

    @property
    def reach(self) -> float:
        """How probable it is that the text goes through a node of the frontier."""
        ...

    def ranks(self, node: int) -> Sequence[int]:
        """Ranks of the candidates that `grow` takes after this node of the frontier; rising."""
        ...

    def grow(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Add candidates after each node of the frontier, best first, with their log q."""
        ...

    def best(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """Tokens, parents and log-probabilities, as in `Proposal`, of at most `max_nodes` nodes."""
        ...

    def first(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """The same of those that were added first, whatever they are."""
        ...


class GrownNodes:
    """The candidates recorded so far, as parallel lists."""

    __slots__ = ("_paths", "depths", "frontier", "log_probs", "parents", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.log_probs: list[float] = []
        self.frontier: list[int] = [ROOT]
        # Log-probability of the path to each node.
        self._paths: list[float] = []

    def score(self, node: int) -> float:
        """Log-probability of the path to a node: the sum of log q along it."""
        return 0.0 if node == ROOT else self._paths[node]

    @property
    def reach(self) -> float:
        """How probable it is that the text goes through a node of the frontier."""
        return sum(exp(self.score(node)) for node in self.frontier)

    def depth(self, node: int) -> int:
        """Depth of a node; 0 for the root."""
        return 0 if node == ROOT else self.depths[node]

    def add(self, parent: int, token: int, log_prob: float) -> int:
        """Record a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depth(parent) + 1)
        self.log_probs.append(log_prob)
        self._paths.append(self.score(parent) + log_prob)
        return len(self.tokens) - 1

    def best(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """The nodes of the most probable paths, parents before children.

        Ties go to the lower depth and then to the earlier node, so that no node comes without
        its parent: of a path of probability 1 the beginning is kept.
        """
        order = sorted(
            range(len(self.tokens)), key=lambda node: (-self._paths[node], self.depths[node], node)
        )
        return self._arrays(order[:max_nodes])

    def first(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """The nodes that were added first; parents are before their children."""
        return self._arrays(range(min(max_nodes, len(self.tokens))))

    def _arrays(self, kept: Sequence[int]) -> tuple[Int32, Int32, Float32]:
        index_of = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
        return (
            np.array([self.tokens[node] for node in kept], dtype=np.int32),
            np.array([index_of[self.parents[node]] for node in kept], dtype=np.int32),
            np.array([self.log_probs[node] for node in kept], dtype=np.float32),
        )


class DynamicExpansion(GrownNodes):
    """EAGLE-2's tree (arXiv 2406.16858): wide where the drafter is unsure, deep where it is sure.

    Every node of a level gets its `top_k` best candidates, all of which are recorded; the `top_k`
    most probable paths among those of a level make the next one, down to `depth`. The nodes that
    are proposed are the most probable of all that were recorded (`best`). A node that is not among
    these is not expanded, as nothing behind it could be.
    """

    __slots__ = ("_depth", "_max_nodes", "_top_k")

    def __init__(self, top_k: int, depth: int, max_nodes: int) -> None:
        """`max_nodes`: what `best` is asked for, at most."""
        super().__init__()
        self._top_k = top_k
        self._depth = depth
        self._max_nodes = max_nodes
        if depth < 1:
            self.frontier = []

    @property
    def num_candidates(self) -> int:
        """Number of candidates that `grow` takes after a node."""
        return self._top_k

    @property
    def most_fed(self) -> int:
        """Upper bound of the nodes that the model is run on, the root not counted."""
        return self._top_k * max(0, self._depth - 1)

    def ranks(self, node: int) -> Sequence[int]:  # noqa: ARG002 - the same for all
        """Ranks of the candidates that `grow` takes after a node."""
        return range(self._top_k)

    def grow(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Add the `top_k` best candidates of each node of the frontier; the best paths go on."""
        depth = self.depth(self.frontier[0]) + 1
        level = [
            self.add(node, token, log_prob)
            for node, node_ids, node_log_probs in zip(self.frontier, ids, log_probs, strict=True)
            for token, log_prob in zip(node_ids[: self._top_k], node_log_probs, strict=False)
        ]
        level.sort(key=lambda node: (-self.score(node), node))
        best = sorted(self._paths, reverse=True)[: self._max_nodes]
        self.frontier = []
        if depth < self._depth and best:
            self.frontier = [node for node in level[: self._top_k] if self.score(node) >= best[-1]]


class StaticExpansion(GrownNodes):
    """The tree of a shape: SpecInfer's widths, Sequoia's growth maps, Medusa's and EAGLE's choices.

    Which candidates are expanded depends on their ranks alone, never on what they are.
    """

    __slots__ = ("_children", "_num_candidates", "_shapes")

    def __init__(self, shape: TreeShape) -> None:
        super().__init__()
        self._num_candidates = shape.num_candidates
        self._children: dict[int, list[tuple[int, int]]] = {}
        pairs = zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True)
        for child, (parent, rank) in enumerate(pairs):
            self._children.setdefault(parent, []).append((rank, child))
        # Which node of the shape each of ours is.
        self._shapes = {ROOT: ROOT}
        if not len(shape):
            self.frontier = []

    @property
    def num_candidates(self) -> int:
        """Number of candidates that `grow` takes after a node."""
        return self._num_candidates

    @property
    def most_fed(self) -> int:
        """Upper bound of the nodes that the model is run on, the root not counted."""
        return len(self._children.keys() - {ROOT})

    def ranks(self, node: int) -> Sequence[int]:
        """Ranks of the candidates that `grow` takes after a node of the frontier."""
        return [rank for rank, _ in self._children[self._shapes[node]]]

    def grow(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Add the candidates whose ranks the shape has; those with children in it go on."""
        level = []
        for node, node_ids, node_log_probs in zip(self.frontier, ids, log_probs, strict=True):
            for rank, child in self._children[self._shapes[node]]:
                if rank < len(node_ids):
                    added = self.add(node, node_ids[rank], node_log_probs[rank])
                    self._shapes[added] = child
                    level.append(added)
        self.frontier = [node for node in level if self._shapes[node] in self._children]


class BestFirstExpansion(GrownNodes):
    """The most probable nodes where a level's distribution is the same behind all of its nodes.

    For drafters that draft all levels at once (DDTree, arXiv 2604.12989): of the product of the
    levels' distributions, `best` takes the prefixes of highest probability, and no other tree of as
    many nodes is expected to be accepted further by it. One node a level, the best, stands for all
    while the levels are asked for.
    """

    __slots__ = ("_depth", "_levels", "_most")

    def __init__(self, most: int, depth: int) -> None:
        """`most`: most nodes of the tree, so that no node has more children."""
        super().__init__()
        self._most = most
        self._depth = depth
        # Tokens and log-probabilities of each level, best first.
        self._levels: list[tuple[Sequence[int], Sequence[float]]] = []
        if min(most, depth) < 1:
            self.frontier = []

    @property
    def num_candidates(self) -> int:
        """Number of candidates that `grow` takes after a node."""
        return self._most

    @property
    def most_fed(self) -> int:
        """Upper bound of the nodes that the model is run on, the root not counted."""
        return max(0, self._depth - 1)

    def ranks(self, node: int) -> Sequence[int]:  # noqa: ARG002 - the same for all
        """Ranks of the candidates that `grow` takes after a node."""
        return range(self._most)

    def grow(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Take the candidates of the next level, behind the best of the last."""
        [node] = self.frontier
        (tokens,), (given,) = ids, log_probs
        self.frontier = []
        if len(tokens):
            self._levels.append((tokens, given))
            best = self.add(node, tokens[0], given[0])
            if len(self._levels) < self._depth:
                self.frontier = [best]

    def best(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """The nodes of the most probable paths, best first, parents before children."""
        nodes = GrownNodes()
        # Log-probability of a path, when it was found, and its parent, level and rank. Of equals
        # the first found is first, and none is found before its parent is taken.
        heap: list[tuple[float, int, int, int, int]] = []
        self._push(heap, nodes, 0, (ROOT, 0, 0))
        found = 1
        while heap and len(nodes.tokens) < max_nodes:
            _, _, parent, level, rank = heappop(heap)
            tokens, given = self._levels[level]
            node = nodes.add(parent, tokens[rank], given[rank])
            self._push(heap, nodes, found, (parent, level, rank + 1))
            self._push(heap, nodes, found + 1, (node, level + 1, 0))
            found += 2
        return nodes.first(max_nodes)

    def _push(
        self,
        heap: list[tuple[float, int, int, int, int]],
        nodes: GrownNodes,
        found: int,
        place: tuple[int, int, int],
    ) -> None:
        """Put a node at `place`, its parent, level and rank, in line, if there is one."""
        parent, level, rank = place
        if level < len(self._levels) and rank < len(self._levels[level][0]):
            score = nodes.score(parent) + self._levels[level][1][rank]
            heappush(heap, (-score, found, parent, level, rank))
