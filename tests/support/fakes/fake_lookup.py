"""A lookup without a store: answers that were put in, or the tokens after the last one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from draftline.core.arrays import Int32
from draftline.core.lookup import Subtree


class FakeLookup:
    """Answers every context with `subtree`, cut to the budget, and records what it was asked."""

    def __init__(self, subtree: Subtree) -> None:
        self.subtree = subtree
        self.asked: list[tuple[list[int], str, int]] = []

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        questions = zip(contexts, namespaces, max_nodes, strict=True)
        self.asked += [(context.tolist(), name, nodes) for context, name, nodes in questions]
        whole = self.subtree
        return [
            Subtree(
                whole.tokens[:nodes],
                whole.parents[:nodes],
                whole.log_probs[:nodes],
                whole.match_len,
            )
            for nodes in max_nodes
        ]


class CountingLookup:
    """A tree of fixed shape whose tokens depend on the context: ids (last + k) modulo the size."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        del namespaces
        parents = np.array([-1, -1, 0, 0, 1, 2, 4], dtype=np.int32)
        log_probs = np.log([0.6, 0.4, 0.7, 0.3, 1.0, 0.5, 0.5]).astype(np.float32)
        return [
            Subtree(
                ((context.sum() + np.arange(1, 8)[:nodes]) % self._vocab_size).astype(np.int32),
                parents[:nodes],
                log_probs[:nodes],
                len(context),
            )
            for context, nodes in zip(contexts, max_nodes, strict=True)
        ]
