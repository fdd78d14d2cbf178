"""The order of documents by what each adds."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.retrieval_store.corpus.selection import NGRAM, by_coverage

RNG = np.random.default_rng(3)


def span(first: int, size: int) -> np.ndarray:
    return np.arange(first, first + size, dtype=np.int32)


def test_what_is_covered_already_adds_nothing() -> None:
    """A copy comes last, and of others what the target would rather say comes first."""
    documents = [span(0, 40), span(0, 40), span(100, 40), span(200, 40)]
    order = list(by_coverage([*documents, span(7, 1)], [0.9, 0.8, 0.5, 0.6, 1.0]))
    assert order[:3] == [0, 3, 2]
    assert sorted(order[3:]) == [1, 4]


def test_of_documents_alike_the_shorter_one_is_better() -> None:
    longer = np.concatenate([span(0, 40), span(0, 40)])
    assert list(by_coverage([longer, span(0, 40)], [0.5, 0.5])) == [1, 0]


@pytest.mark.parametrize("is_by_token", [True, False])
def test_the_choice_is_greedy(is_by_token: bool) -> None:
    """Looking again at the best alone gives what looking at all gives."""
    documents = [RNG.integers(0, 3, 30) for _ in range(12)]
    weights = [RNG.random(30) if is_by_token else np.full(30, RNG.random()) for _ in documents]
    expected: list[int] = []
    covered: set[tuple[int, ...]] = set()

    def gain(index: int) -> float:
        ids, seen = documents[index], dict[tuple[int, ...], float]()
        for end in range(NGRAM, len(ids) + 1):
            gram = tuple(ids[end - NGRAM : end].tolist())
            seen.setdefault(gram, float(weights[index][end - 1]))
        return sum(worth for gram, worth in seen.items() if gram not in covered) / len(ids)

    while len(expected) < len(documents):
        best = max((one for one in range(len(documents)) if one not in expected), key=gain)
        expected.append(best)
        ids = documents[best]
        covered |= {tuple(ids[end - 4 : end].tolist()) for end in range(4, len(ids) + 1)}
    given = weights if is_by_token else [float(one[0]) for one in weights]
    # Where nothing is added any more, any order is right.
    assert list(by_coverage(documents, given))[:5] == expected[:5]


def test_n_grams_are_told_apart() -> None:
    """All orders of four tokens are n-grams of their own, and so are their multiples."""
    orders = np.array(np.meshgrid(*[np.arange(12)] * NGRAM)).reshape(NGRAM, -1).T
    documents = [row.astype(np.int64) * scale for scale in (1, 1000) for row in orders[::7]]
    distinct = len({tuple(row.tolist()) for row in documents})
    order = list(by_coverage(documents, [1.0] * len(documents)))
    seen: set[tuple[int, ...]] = set()
    for index in order[:distinct]:
        seen.add(tuple(documents[index].tolist()))
    assert len(seen) == distinct
