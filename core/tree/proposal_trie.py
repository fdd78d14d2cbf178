"""Builds one proposal from several token sequences that share prefixes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..arrays import ROOT
from ..proposals import Probe, Proposal


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
