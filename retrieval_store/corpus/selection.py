"""Which documents of a corpus stay, where not all do: docs/retrieval.md, "What to keep".

Documents of low perplexity are often alike, and a near copy answers no lookup that the original
does not. So documents may be ordered greedily by the n-grams that each adds to those before it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from ...core.arrays import Float32, Float64, UInt64
from ...core.errors import ConfigError
from .documents import TokenizedDocument
from .refine import Score, decode_probs

# Tokens of an n-gram whose coverage counts.
NGRAM = 4
# Odd, so that multiplication loses nothing (Knuth's multiplier for 64 bits).
MULTIPLIER = np.uint64(6364136223846793005)
MAX_INT32 = np.iinfo(np.int32).max
LOWEST, COVERAGE, TOKEN_COVERAGE = "lowest", "coverage", "token_coverage"
SELECTIONS = (LOWEST, COVERAGE, TOKEN_COVERAGE)


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


def resolve_selection(select: str | None, keep: int | None) -> str:
    """The selection to use. None means `token_coverage` if `keep` is set, else `lowest`.

    Raises `ConfigError` if there is none of this name, or it needs `keep`.
    """
    if select is None:
        return LOWEST if keep is None else TOKEN_COVERAGE
    if select not in SELECTIONS:
        raise ConfigError("select", f"must be one of {', '.join(SELECTIONS)}, got {select!r}")
    if select != LOWEST and keep is None:
        raise ConfigError("select", f"{select} needs keep: how many documents stay")
    return select


def choose(
    documents: Sequence[TokenizedDocument],
    scores: Sequence[Score],
    select: str,
    *,
    keep: int | None = None,
    max_perplexity: float | None = None,
) -> list[int]:
    """Indices, ascending, of the first `keep` in the order of `ranking`; None: all of it."""
    return sorted(islice(ranking(documents, scores, select, max_perplexity), keep))


def ranking(
    documents: Sequence[TokenizedDocument],
    scores: Sequence[Score],
    select: str,
    max_perplexity: float | None = None,
) -> Iterator[int]:
    """Indices of the documents in the order in which they are chosen.

    select  `lowest`: by perplexity; equal ones in their order. `coverage`: the document that adds
            most n-grams comes first, see `by_coverage`, each weighted by 1 over its document's
            perplexity; `token_coverage`: by the target's probability of its last token, 0 where
            that token is not scored, for which every score needs its `token_probs`

    None above `max_perplexity`, and none of infinite perplexity.
    """
    perplexities = [score.perplexity for score in scores]
    likely = _likely(perplexities, max_perplexity)
    if select == LOWEST:
        return iter(sorted(likely, key=lambda index: (perplexities[index], index)))
    if not likely:
        return iter(())
    # Decoded lazily: as float64 they take eight times the memory of their bytes.
    weights = (
        1 / perplexities[index] if select == COVERAGE else decode_probs(_codes(scores[index]))
        for index in likely
    )
    order = by_coverage([documents[index].ids for index in likely], weights)
    return (likely[place] for place in order)


def _likely(perplexities: Sequence[float], max_perplexity: float | None) -> list[int]:
    """Indices of the finite perplexities that are at most `max_perplexity`; None: no limit."""
    limit = math.inf if max_perplexity is None else max_perplexity
    return [index for index, one in enumerate(perplexities) if one <= limit and math.isfinite(one)]


def _codes(score: Score) -> bytes:
    assert score.token_probs is not None, "scores without token_probs"
    return score.token_probs
