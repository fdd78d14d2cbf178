"""The choices and the rows of the refinement experiment, on made-up documents."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.benchmarks.retrieval.refinement.selection import (
    Choice,
    Scored,
    by_coverage,
    choices,
)
from draftline.benchmarks.retrieval.refinement.table import rows_of

RNG = np.random.default_rng(3)


def document(first: int, size: int, prob: float) -> Scored:
    return Scored(np.arange(first, first + size), np.full(size, prob))


def test_what_is_covered_already_adds_nothing() -> None:
    """A copy comes last, and of others what the target would rather say comes first."""
    documents = [
        document(0, 40, 0.9),
        document(0, 40, 0.8),
        document(100, 40, 0.5),
        document(200, 40, 0.6),
        Scored(np.array([7]), np.array([0.0])),
    ]
    assert list(by_coverage(documents, 10_000))[:4] == [0, 3, 2, 1]
    assert list(by_coverage(documents, 41)) == [0, 3]


def test_coverage_is_greedy() -> None:
    """Looking again at the best alone gives what looking at all gives."""
    documents = [Scored(RNG.integers(0, 3, 30), RNG.random(30)) for _ in range(12)]
    expected: list[int] = []
    covered: set[tuple[int, ...]] = set()

    def gain(one: Scored) -> float:
        seen: dict[tuple[int, ...], float] = {}
        for end in range(4, len(one.ids) + 1):
            seen.setdefault(tuple(one.ids[end - 4 : end].tolist()), float(one.probs[end - 1]))
        return sum(prob for gram, prob in seen.items() if gram not in covered) / len(one.ids)

    while len(expected) < len(documents):
        left = [index for index in range(len(documents)) if index not in expected]
        best = max(left, key=lambda index: gain(documents[index]))
        expected.append(best)
        ids = documents[best].ids
        covered |= {tuple(ids[end - 4 : end].tolist()) for end in range(4, len(ids) + 1)}
    found = list(by_coverage(documents, 10_000))
    # Where nothing is added any more, any order is right.
    assert found[:5] == expected[:5]


def test_stores_have_as_many_tokens() -> None:
    documents = [document(50 * n, 20, 0.1 + 0.08 * (n % 10)) for n in range(100)]
    found = list(choices(documents, (0.1, 0.5), 3))
    sizes = {one.name: sum(len(documents[i].ids) for i in one.indices) for one in found}
    assert sizes.pop("whole-2000-0") == 2000
    assert {name: size for name, size in sizes.items() if size != int(name.split("-")[1])} == {}
    assert [one.kind for one in found].count("random") == 6
    lowest = next(one for one in found if one.kind == "lowest" and one.budget == 200)
    assert {index % 10 for index in lowest.indices} == {9}
    first, second, _ = (one.indices for one in found if one.kind == "random" and one.budget == 200)
    assert set(first) != set(second)


def test_differences_to_random_stores_have_intervals() -> None:
    """The lowest is better by 5 tokens of 50 at each prompt, whatever the prompt is."""
    prompts = RNG.integers(30, 300, 40)
    steps = np.full(40, 20)

    def counts(more: int) -> np.ndarray:
        return np.stack([prompts + more, steps], axis=1).astype(np.float64)

    stores = [Choice("lowest", 100, 0, ()), *(Choice("random", 100, n, ()) for n in range(4))]
    found = {"core": counts(0)}
    for store in stores:
        more = 5 if store.kind == "lowest" else store.draw % 2
        found |= {store.name: counts(more), f"{store.name}+core": counts(more)}
    sizes = {store.name: 100 for store in stores}
    rows = {row["kind"]: row for row in rows_of(stores, found, sizes, {}, {})}
    assert rows.keys() == {"CORE alone", "lowest", "random"}
    beyond = rows["lowest"]["alone_beyond_random"]
    assert beyond["value"] == pytest.approx(4.5 / 20)
    assert 3.999 / 20 <= beyond["low"] < beyond["high"] <= 5.001 / 20
    assert rows["random"]["alone_least_most"][0] < rows["random"]["alone_least_most"][1]
    assert rows["CORE alone"]["with_core"]["value"] == pytest.approx(prompts.mean() / 20)
