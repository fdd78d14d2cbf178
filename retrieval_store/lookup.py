"""The most probable continuations of a context over the segments that a tenant may read.

The longest stored suffix of the context (16 down to 2 tokens) gives the counts. Where it was seen
fewer than `ENOUGH_COUNT` times, the longest suffix that was seen so often is a second opinion; how
they are weighed is told in `continuation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..core.lookup import Subtree, empty_subtree
from ..core.types import Int32
from .continuation import View, most_probable_subtree
from .segment import MAX_CONTEXT, Segment
from .suffix_search import TOKEN_BYTES, SuffixSearch

SHARED = "shared"
MIN_CONTEXT = 2
ENOUGH_COUNT = 4


class SegmentLookup:
    """Implements `core.lookup.Lookup` over immutable segments in this process.

    Never changes after construction: replace the whole object to change what is stored. Two
    namespaces never touch one another's segments, so neither answers nor times tell of them.
    """

    def __init__(self, segments: Mapping[str, Sequence[Segment]]) -> None:
        self._searches = {
            namespace: [SuffixSearch(segment) for segment in listed if len(segment.text)]
            for namespace, listed in segments.items()
        }

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        """One subtree a context, in order; see `core.lookup.Lookup`."""
        return [
            self._lookup_one(context, namespace, budget)
            for context, namespace, budget in zip(contexts, namespaces, max_nodes, strict=True)
        ]

    def _lookup_one(self, context: Int32, namespace: str, budget: int) -> Subtree:
        names = (SHARED,) if namespace == SHARED else (namespace, SHARED)
        searches = [search for name in names for search in self._searches.get(name, ())]
        if not searches or budget <= 0:
            return empty_subtree()
        text = context[-MAX_CONTEXT:].astype(">u4").tobytes()
        lengths = _context_lengths(searches, text)
        if not lengths:
            return empty_subtree()
        views: list[View] = []
        for level, length in enumerate(lengths):
            suffix = _suffix(text, length)
            for search in searches:
                low, high = search.find(suffix)
                if low < high:
                    views.append((search, level, length, (low, high)))
        return most_probable_subtree(views, budget, match_len=lengths[0])


def _suffix(text: bytes, length: int) -> bytes:
    return text[len(text) - length * TOKEN_BYTES :]


def _context_lengths(searches: list[SuffixSearch], text: bytes) -> list[int]:
    """Length of the longest stored suffix, then of the longest one seen often, if it is shorter."""
    counts: dict[int, int] = {}

    def count(length: int) -> int:
        if length not in counts:
            suffix = _suffix(text, length)
            counts[length] = sum(search.count_up_to(suffix, ENOUGH_COUNT) for search in searches)
        return counts[length]

    longest = _longest(len(text) // TOKEN_BYTES, lambda length: count(length) > 0)
    if longest < MIN_CONTEXT:
        return []
    frequent = _longest(longest, lambda length: count(length) >= ENOUGH_COUNT)
    return [longest] if frequent in (longest, MIN_CONTEXT - 1) else [longest, frequent]


def _longest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest length in MIN_CONTEXT..most that holds, MIN_CONTEXT - 1 if none does.

    A length that holds implies that all shorter ones do.
    """
    low, high = MIN_CONTEXT - 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
