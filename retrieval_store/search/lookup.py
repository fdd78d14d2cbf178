"""The most probable continuations of a context over the segments that a tenant may read.

The longest stored suffix of the context (16 down to 2 tokens) gives the counts. Where it was seen
fewer than `ENOUGH_COUNT` times, the longest suffix that was seen so often is a second opinion; how
they are weighed is told in `continuation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...core.arrays import Float32, Int32, Int64
from ...core.compiled import compiled
from ...core.interfaces import Subtree, empty_subtree
from ..segment.segment import MAX_CONTEXT, Segment, build_segment
from ..segment.view import segment_rows
from .continuation import PARENT, TOKEN, grow
from .suffix_search import longest_matches

SHARED = "shared"
MIN_CONTEXT = 2
ENOUGH_COUNT = 4


class SegmentLookup:
    """Implements `core.interfaces.Lookup` over immutable segments in this process.

    Never changes after construction: replace the whole object to change what is stored. Two
    namespaces never touch one another's segments, so neither answers nor times tell of them.
    """

    def __init__(self, segments: Mapping[str, Sequence[Segment]]) -> None:
        # The rows point into the segments.
        self._segments = {
            namespace: [segment for segment in listed if len(segment.text)]
            for namespace, listed in segments.items()
        }
        self._shared = segment_rows(self._segments.get(SHARED, ()))
        self._rows = {
            namespace: np.concatenate([segment_rows(listed), self._shared])
            for namespace, listed in self._segments.items()
            if namespace != SHARED
        }

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        """One subtree a context, in order: the most probable continuations, best first."""
        return [
            self._lookup_one(context, self._rows.get(namespace, self._shared), budget)
            for context, namespace, budget in zip(contexts, namespaces, max_nodes, strict=True)
        ]

    @staticmethod
    def _lookup_one(context: Int32, rows: Int64, budget: int) -> Subtree:
        if not len(rows) or budget <= 0 or len(context) < MIN_CONTEXT:
            return empty_subtree()
        match_len, nodes, log_probs = _subtree(rows, context[-MAX_CONTEXT:], budget)
        return Subtree(nodes[0], nodes[1], log_probs, match_len)


def load_compiled_lookup() -> None:
    """Load or compile the loops of a lookup, so that the first one is as quick as later ones."""
    tokens = np.arange(3, dtype=np.int32)
    segment = build_segment([tokens], tokenizer_hash="", model_hash="", vocab_size=3)
    SegmentLookup({SHARED: [segment]}).lookup([tokens[:2]], [SHARED], [1])


@compiled
def _subtree(rows: Int64, text: Int32, budget: int) -> tuple[int, Int32, Float32]:
    """The length of the match, tokens and parents int32 [2, n], and log-probabilities."""
    context = text.astype(np.int64)
    lengths, spans = longest_matches(rows, context, MIN_CONTEXT, ENOUGH_COUNT)
    if not len(lengths):
        return 0, np.empty((2, 0), dtype=np.int32), np.empty(0, dtype=np.float32)
    nodes, log_probs = grow(rows, lengths, spans, budget)
    tree = np.empty((2, len(nodes)), dtype=np.int32)
    tree[0], tree[1] = nodes[:, TOKEN], nodes[:, PARENT]
    return int(lengths[0]), tree, log_probs.astype(np.float32)
