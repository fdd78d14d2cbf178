"""The token tree of one request: all drafters' proposals merged by prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .types import ROOT, Bool, Int32, Proposal


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Merged nodes in topological order; node i is row i + 1 of the request's step, root is row 0.

    tokens   int32 [n]
    parents  int32 [n]  -1 is the root (the last committed token)
    depths   int32 [n]  1 for children of the root
    sources  n names: the drafter that proposed the node first
    children (parent, token) -> node; siblings never share a token
    """

    tokens: Int32
    parents: Int32
    depths: Int32
    sources: tuple[str, ...]
    children: dict[tuple[int, int], int]

    def __len__(self) -> int:
        return len(self.tokens)

    def mask(self) -> Bool:
        """bool [n + 1, n + 1]: row i sees row j; row 0 is the root, and every row sees itself."""
        size = len(self) + 1
        # Whole numbers as bit sets: a numpy operation a node would take most of a step's time.
        rows = [1]
        for node, parent in enumerate(self.parents.tolist()):
            rows.append(rows[parent + 1] | (2 << node))
        width = (size + 7) // 8
        packed = b"".join([row.to_bytes(width, "little") for row in rows])
        bits = np.frombuffer(packed, dtype=np.uint8).reshape(size, width)
        return np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)

    def check(self) -> None:
        """Assert the invariants above."""
        count = len(self)
        assert self.parents.shape == self.depths.shape == (count,) == (len(self.sources),)
        assert np.all((self.parents >= ROOT) & (self.parents < np.arange(count)))
        above = np.where(self.parents == ROOT, 0, self.depths[self.parents])
        assert np.array_equal(self.depths, above + 1)
        pairs = list(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        assert self.children == {pair: node for node, pair in enumerate(pairs)}
        assert len(self.children) == count


def merge(proposals: Sequence[Proposal], max_nodes: int, max_depth: int) -> TokenTree:
    """Merge proposals by prefix, in order of priority, under a node budget.

    Earlier proposals buy their nodes first, so that internal guesses come before external ones
    (SPECTRA, Algorithm 1). A node that is already there costs nothing. What exceeds `max_nodes`
    or `max_depth` is cut, with its descendants.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    sources: list[str] = []
    children: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        # merged[i]: the tree node that the proposal's node i became; None where it was cut.
        merged: list[int | None] = []
        nodes = zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True)
        for token, own_parent in nodes:
            parent = ROOT if own_parent == ROOT else merged[own_parent]
            if parent is None:
                merged.append(None)
                continue
            node = children.get((parent, token))
            if node is None and len(tokens) < max_nodes:
                depth = 1 if parent == ROOT else depths[parent] + 1
                if depth > max_depth:
                    merged.append(None)
                    continue
                node = children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
                sources.append(proposal.source)
            merged.append(node)
    return TokenTree(
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        tuple(sources),
        children,
    )
