"""The static tree that brings most tokens a second, by what is measured while it drafts.

Sequoia (Chen et al., arXiv 2402.12374) measures acceptance by rank and the time of a verification
beforehand and fixes one tree. Here both are running means, and size, depth and shape follow them.
See docs/drafters.md, "Model trees".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.arrays import ROOT, Float64, Int32
from ...core.speculation.step_cost import LineFit
from ..tree_shape import TreeShape, fastest_shape_of_sequoia, shape_of_sequoia
from .draft_costs import DraftCosts

# Ranks that the tree may use, and what a judged node leaves of the weight of those before it.
NUM_RANKS = 8
DECAY = 0.998
# Before any was judged: the child of rank b (from 1) is taken for right so often, as if so many had
# been judged.
FIRST_ACCEPTANCE, FALL, PRIOR_JUDGED = 0.6, 1.5, 8.0
# What a verification leaves of the weight of those before it; squares of nodes that a guess counts
# for: a node takes nothing until it was measured.
TIME_DECAY, PRIOR_SQUARES = 0.98, 64.0
# Trees that are drafted by one shape before it is thought over again.
KEPT_FOR = 32


class SequoiaShapes:
    """Learns acceptance by rank and what a verification takes, and gives the shape to draft."""

    def __init__(
        self,
        costs: DraftCosts,
        *,
        is_full: bool = False,
        is_one_pass: bool = False,
    ) -> None:
        """`costs`: the drafter's own means, of the seconds of a pass.

        is_full      trees have all nodes that they may, whatever these take
        is_one_pass  a pass drafts all levels, however many
        """
        self._costs = costs
        self._is_full = is_full
        self._is_one_pass = is_one_pass
        ranks = np.arange(1, NUM_RANKS + 1, dtype=np.float64)
        self._judged: Float64 = np.full(NUM_RANKS, PRIOR_JUDGED)
        self._accepted: Float64 = self._judged * FIRST_ACCEPTANCE / np.power(ranks, FALL)
        self._verify = LineFit(TIME_DECAY)
        self._shapes: dict[tuple[int, int], TreeShape] = {}
        self._num_left = KEPT_FOR
        # Compiles the loops, or reads them from disk, before a request waits for them.
        self._best(1, 1)

    @property
    def acceptance(self) -> Float64:
        """float64 [ranks]: how often the child of each rank is right where its parent is."""
        return self._accepted / self._judged

    def shape(self, max_nodes: int, max_depth: int) -> TreeShape:
        """The tree of at most so many nodes and levels, one node at least."""
        self._num_left -= 1
        if self._num_left <= 0:
            self._shapes.clear()
            self._num_left = KEPT_FOR
        key = max_nodes, max_depth
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = self._best(max_nodes, max_depth)
        return found

    def note_verify(self, num_nodes: float, seconds: float) -> None:
        """A verification of so many nodes a request took so long."""
        self._verify.record(num_nodes, seconds)

    def judge(self, tokens: Int32, parents: Int32, target_tokens: Sequence[int]) -> None:
        """Learn from a proposal, siblings in the order of their ranks, and from the target's tokens
        after its root, which of its nodes were right.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            children.setdefault(parent, []).append(node)
        node = ROOT
        for token in target_tokens:
            siblings = children.get(node, [])[:NUM_RANKS]
            right = next((rank for rank, one in enumerate(siblings) if tokens[one] == token), None)
            self._judged[: len(siblings)] *= DECAY
            self._accepted[: len(siblings)] *= DECAY
            self._judged[: len(siblings)] += 1.0
            if right is None:
                return
            self._accepted[right] += 1.0
            node = siblings[right]

    def _best(self, max_nodes: int, max_depth: int) -> TreeShape:
        acceptance = self.acceptance.tolist()
        if self._is_full:
            return shape_of_sequoia(acceptance, max_nodes, max_depth)[0]
        alone_s, node_s = self._costs.verify_s, 0.0
        if self._verify.weight:
            alone_s, node_s = self._verify.parts(PRIOR_SQUARES)
        draw_s = self._costs.draw_s

        def seconds(nodes: int, depth: int) -> float:
            passes = min(depth, 1) if self._is_one_pass else depth
            return alone_s + node_s * nodes + draw_s * passes

        shape = fastest_shape_of_sequoia(acceptance, max_nodes, max_depth, seconds)
        # Who never drafts never learns that it would pay.
        return shape if len(shape) else shape_of_sequoia(acceptance, 1, 1)[0]
