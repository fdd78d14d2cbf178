"""Orders documents greedily by the n-grams that each adds to the ones before it.

Documents of low perplexity are often alike. A near copy answers no lookup that the original does
not. See docs/retrieval.md, "What to keep".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ...core.arrays import Float32, Float64, UInt64

# Tokens of an n-gram whose coverage counts.
NGRAM = 4
# Odd, so that multiplication loses nothing (Knuth's multiplier for 64 bits).
MULTIPLIER = np.uint64(6364136223846793005)
MAX_INT32 = np.iinfo(np.int32).max


def by_coverage(
    documents: Sequence[npt.NDArray[np.integer]], weights: Iterable[Float64 | float]
) -> Iterator[int]:
    """Indices of the documents, ordered by the weight that each adds per token.

    weights  for each document, float64 [n]: the weight of the n-gram that ends at each token, such
             as the target's probability of that token; or one number for all of them. Read once, in
             order

    A document adds the weights of the n-grams that no earlier document has. This gain only falls,
    so the lazy greedy algorithm re-evaluates only the best candidate (Minoux 1978). The result is
    within 1 - 1/e of the optimum (Nemhauser, Wolsey and Fisher 1978). Takes up to 17 bytes a token.
    """
    grams, worth, num_grams = _grams(documents, weights)
    is_new = np.ones(num_grams, dtype=np.bool_)

    def gain(index: int) -> float:
        added = (worth[index] * is_new[grams[index]]).sum(dtype=np.float64)
        return float(added) / len(documents[index])

    queue = [(-gain(index), index) for index in range(len(documents))]
    heapq.heapify(queue)
    while queue:
        _, index = heapq.heappop(queue)
        now = -gain(index)
        if queue and now > queue[0][0]:
            heapq.heappush(queue, (now, index))
            continue
        is_new[grams[index]] = False
        yield index


def _grams(
    documents: Sequence[npt.NDArray[np.integer]], weights: Iterable[Float64 | float]
) -> tuple[list[npt.NDArray[np.integer]], list[Float32], int]:
    """The distinct n-grams of each document, numbered from 0; the weight of each at its first
    occurrence in the document; and the total number of n-grams.
    """
    known = _distinct(documents)
    dtype = np.int32 if len(known) < MAX_INT32 else np.int64
    grams: list[npt.NDArray[np.integer]] = []
    worth: list[Float32] = []
    for ids, weight in zip(documents, weights, strict=True):
        own, first = np.unique(_hashes(ids), return_index=True)
        grams.append(np.searchsorted(known, own).astype(dtype))
        each = np.asarray(weight, dtype=np.float32)
        worth.append(each[NGRAM - 1 :][first] if each.ndim else np.full(len(own), each))
    return grams, worth, len(known)


def _distinct(documents: Sequence[npt.NDArray[np.integer]]) -> UInt64:
    """The distinct hashes of all n-grams, ascending; sorted in place to save memory."""
    hashes = np.empty(sum(max(len(ids) - NGRAM + 1, 0) for ids in documents), dtype=np.uint64)
    end = 0
    for ids in documents:
        own = _hashes(ids)
        hashes[end : end + len(own)] = own
        end += len(own)
    hashes.sort()
    is_first = np.ones(len(hashes), dtype=np.bool_)
    np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
    return hashes[is_first]


def _hashes(ids: npt.NDArray[np.integer]) -> UInt64:
    """uint64 [n - 3]: the hash of each n-gram; a million n-grams collide with probability 10^-7."""
    count = max(len(ids) - NGRAM + 1, 0)
    found = np.zeros(count, dtype=np.uint64)
    for place in range(NGRAM):
        found = found * MULTIPLIER + ids[place : place + count].astype(np.uint64) + np.uint64(1)
        found ^= found >> np.uint64(29)
    return found
