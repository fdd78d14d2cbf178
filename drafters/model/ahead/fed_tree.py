"""Rows behind the cached part of a text that a model is run on, level by level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....core.arrays import ROOT, Int32
from ....core.step.layout import kv_slots
from ....core.steps import TreeRows
from ....core.tree.kernels import pack


class FedTree:
    """Nodes in the order in which they are fed, each in the KV slot behind the one before it.

    The first ones may be the end of the text, one below the other: then their slots are those of
    its tokens.

    context_len  tokens of the text that are cached, which every node sees
    num_fed      nodes whose KV is written
    """

    __slots__ = ("_ancestors", "_blocks", "context_len", "num_fed", "tokens")

    def __init__(self, context_len: int, blocks: Sequence[int]) -> None:
        self.context_len = context_len
        self.num_fed = 0
        self.tokens: list[int] = []
        self._blocks = blocks
        # Of each node, itself included.
        self._ancestors: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int) -> int:
        """Feed a token behind `parent`, or the cached text, with the next pass; its index."""
        node = len(self.tokens)
        above = [] if parent == ROOT else self._ancestors[parent]
        self.tokens.append(token)
        self._ancestors.append([*above, node])
        return node

    def position(self, node: int) -> int:
        """Where it stands in the text, if it is said."""
        return self.context_len + len(self._ancestors[node]) - 1

    def rows(self, block_size: int) -> TreeRows:
        """All nodes as columns; those that the next pass feeds, as its rows."""
        count = len(self.tokens)
        mask = np.zeros((count - self.num_fed, count), dtype=np.bool_)
        for row, ancestors in enumerate(self._ancestors[self.num_fed :]):
            mask[row, ancestors] = True
        table = np.array([self._blocks], dtype=np.int32)
        places = np.arange(self.context_len, self.context_len + count, dtype=np.int32)
        slots = kv_slots(table, np.zeros_like(places), places, block_size)
        return TreeRows(pack(mask), slots, self._positions())

    def _positions(self) -> Int32:
        return np.array([self.position(node) for node in range(len(self))], dtype=np.int32)
