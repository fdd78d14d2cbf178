"""The choices and the rows of the refinement experiment, on made-up documents."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.benchmarks.retrieval.refinement.stores import DocumentChoice, choices
from draftline.benchmarks.retrieval.refinement.table import rows_of
from draftline.retrieval_store.corpus.documents import TokenizedDocument
from draftline.retrieval_store.corpus.refine import Score, encode_probs

RNG = np.random.default_rng(3)


def score(size: int, prob: float) -> Score:
    log_probs = np.full(size, np.log(prob))
    return Score(log_probs.sum(), size, encode_probs(log_probs).tobytes())


def test_stores_have_as_many_tokens() -> None:
    documents = [
        TokenizedDocument(np.arange(50 * n, 50 * n + 20, dtype=np.int32)) for n in range(100)
    ]
    scores = [score(20, 0.1 + 0.08 * (n % 10)) for n in range(100)]
    found = list(choices(documents, scores, (0.1, 0.5), 3))
    sizes = {one.name: sum(len(documents[i].ids) for i in one.indices) for one in found}
    assert sizes.pop("whole-2000-0") == 2000
    assert {name: size for name, size in sizes.items() if size != int(name.split("-")[1])} == {}
    assert [one.kind for one in found].count("random") == 6
    for kind in ("lowest", "coverage", "token_coverage"):
        best = next(one for one in found if one.kind == kind and one.budget == 200)
        assert {index % 10 for index in best.indices} == {9}
    first, second, _ = (one.indices for one in found if one.kind == "random" and one.budget == 200)
    assert set(first) != set(second)


def test_differences_to_random_stores_have_intervals() -> None:
    """The lowest is better by 5 tokens of 50 at each prompt, whatever the prompt is."""
    prompts = RNG.integers(30, 300, 40)
    steps = np.full(40, 20)

    def counts(more: int) -> np.ndarray:
        return np.stack([prompts + more, steps], axis=1).astype(np.float64)

    stores = [
        DocumentChoice("lowest", 100, 0, ()),
        *(DocumentChoice("random", 100, n, ()) for n in range(4)),
    ]
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
