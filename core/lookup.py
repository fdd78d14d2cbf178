"""What a retrieval lookup answers: the stored continuations of a context, as a small tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .arrays import Float32, Int32


@dataclass(frozen=True, slots=True, eq=False)
class Subtree:
    """Stored continuations of one context, below its last token.

    tokens     int32 [n]    target token ids
    parents    int32 [n]    index of the parent node, always smaller than the own index; -1 is the
                            context's last token
    log_probs  float32 [n]  natural log of each node's probability given its parent, at most 0
    match_len  how many of the context's last tokens were matched; 0 if none, with no nodes

    A child's path probability (the sum of log-probabilities from the root) is never above its
    parent's, and a lookup answers with the nodes of the highest path probability, best first.
    """

    tokens: Int32
    parents: Int32
    log_probs: Float32
    match_len: int


class Lookup(Protocol):
    """Finds continuations by the longest stored suffix of a context."""

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        """One subtree a context, in order, of at most `max_nodes` nodes each.

        contexts: int32 [at most 16], the last tokens of each text, oldest first. `namespaces`
        names whose data each may read besides `shared`. Pure: the same stored data and arguments
        give the same answer. Raises `StoreError` or `DrafterError` when no answer can be had.
        """
        ...


def empty_subtree() -> Subtree:
    """The answer for a context that is not stored."""
    none = np.empty(0, dtype=np.int32)
    return Subtree(none, none, np.empty(0, dtype=np.float32), 0)
