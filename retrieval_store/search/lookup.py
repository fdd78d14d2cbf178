"""The most probable continuations of a context over the segments that a tenant may read.

The longest stored suffix of the context (16 down to 2 tokens) gives the counts. If it occurs fewer
than `ENOUGH_COUNT` times, the longest suffix that occurs that often is a back-off level;
`continuation.py` has the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arrays import Float32, Int32, Int64
from ...core.compiled import compiled
from ...core.interfaces import Subtree, empty_subtree
from ..segment.segment import MAX_CONTEXT, MAX_CONTINUATION, Segment, build_segment
from ..segment.view import segment_rows
from .continuation import PARENT, PRIOR, TOKEN, grow
from .suffix_search import longest_matches

SHARED = "shared"
MIN_CONTEXT = 2
ENOUGH_COUNT = 4


@dataclass(frozen=True, slots=True)
class LookupRule:
    """How continuations are found and counted.

    enough_count  a rarer longest match also uses the back-off level; 1: none does
    prior         weight of unseen tokens, as in `continuation.py`; 0: counts alone
    max_hits      number of occurrences of the match that count in a segment, the first ones in the
                  order of their continuations; 0: all
    max_depth     longest continuation
    """

    enough_count: int = ENOUGH_COUNT
    prior: float = PRIOR
    max_hits: int = 0
    max_depth: int = MAX_CONTINUATION


# He et al. 2024, `FasterDecoding/REST`: the most frequent prefixes of what follows.
REST_RULE = LookupRule(enough_count=1, prior=0.0, max_hits=5000, max_depth=10)


class SegmentLookup:
    """Implements `core.interfaces.Lookup` over immutable segments in this process.

    Never changes after construction: replace the whole object to change what is stored. A lookup
    touches only its own namespace's segments, so neither answers nor timings leak others.
    """

    def __init__(
        self, segments: Mapping[str, Sequence[Segment]], rule: LookupRule | None = None
    ) -> None:
        rule = rule or LookupRule()
        self._limits = np.array([rule.enough_count, rule.max_hits, rule.max_depth], dtype=np.int64)
        self._prior = rule.prior
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

    def _lookup_one(self, context: Int32, rows: Int64, budget: int) -> Subtree:
        if not len(rows) or budget <= 0 or len(context) < MIN_CONTEXT:
            return empty_subtree()
        text = context[-MAX_CONTEXT:]
        match_len, nodes, log_probs = _subtree(rows, text, budget, self._limits, self._prior)
        return Subtree(nodes[0], nodes[1], log_probs, match_len)


def load_compiled_lookup() -> None:
    """Load or compile the loops of a lookup, so that the first lookup is as fast as later ones."""
    tokens = np.arange(3, dtype=np.int32)
    segment = build_segment([tokens], tokenizer_hash="", model_hash="", vocab_size=3)
    SegmentLookup({SHARED: [segment]}).lookup([tokens[:2]], [SHARED], [1])


@compiled
def _subtree(
    rows: Int64, text: Int32, budget: int, limits: Int64, prior: float
) -> tuple[int, Int32, Float32]:
    """The length of the match, tokens and parents int32 [2, n], and log-probabilities.

    limits  int64 [3]  `enough_count`, `max_hits` and `max_depth` of the rule
    """
    context = text.astype(np.int64)
    enough_count, max_hits, max_depth = limits
    lengths, spans = longest_matches(rows, context, MIN_CONTEXT, enough_count)
    if not len(lengths):
        return 0, np.empty((2, 0), dtype=np.int32), np.empty(0, dtype=np.float32)
    if max_hits:
        for span in spans:
            if span[1] - span[0] > max_hits:
                # Wide nodes are tabulated for whole spans only.
                span[1], span[2] = span[0] + max_hits, -1
    nodes, log_probs = grow(rows, lengths, spans, budget, max_depth, prior)
    tree = np.empty((2, len(nodes)), dtype=np.int32)
    tree[0], tree[1] = nodes[:, TOKEN], nodes[:, PARENT]
    return int(lengths[0]), tree, log_probs.astype(np.float32)
