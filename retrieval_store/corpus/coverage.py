"""Puts documents into the order in which each adds most that those before it do not have.

Documents of low perplexity are often alike, and a second one of a kind answers no lookup that the
first does not. See docs/retrieval.md, "What to keep".
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
    """Indices of the documents in the order of what each adds for its tokens.

    weights  of each document: float64 [n], what the n-gram that ends at each token is worth, as the
             target's probability of that token; or one number for all of them. Read once, one
             after the other

    It adds the weights of its n-grams that no document before it has. What a document adds only
    falls, so the greedy choice looks again at the best alone (Minoux 1978), and is within 1 - 1/e
    of the best choice there is (Nemhauser, Wolsey and Fisher 1978). Takes up
    to 17 bytes a token.
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
    """The n-grams of each document, once each, as numbers from 0; the weight of each where it first
    stands there; and how many there are in all.
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
    """The hashes of all n-grams, ascending, once each; in place, since they are many."""
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
    """uint64 [n - 3]: of each n-gram; two of a million are alike by a chance of 1 in 10^7."""
    count = max(len(ids) - NGRAM + 1, 0)
    found = np.zeros(count, dtype=np.uint64)
    for place in range(NGRAM):
        found = found * MULTIPLIER + ids[place : place + count].astype(np.uint64) + np.uint64(1)
        found ^= found >> np.uint64(29)
    return found
