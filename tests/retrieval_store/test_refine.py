from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.core.types import Int32
from draftline.retrieval_store.refine import Windows, choose_lowest, perplexities
from hypothesis import given
from hypothesis import strategies as st

BOS = 1000


class BigramScorer:
    """A model that sees one token back, so that windows with an overlap lose nothing."""

    def __init__(self, window: int) -> None:
        self.window = window

    def score(self, documents: Sequence[Int32]) -> list[tuple[float, int]]:
        assert all(len(document) <= self.window for document in documents)
        return [
            (
                sum(bigram(a, b) for a, b in pairwise(d.tolist())),
                max(len(d) - 1, 0),
            )
            for d in documents
        ]


def bigram(left: int, right: int) -> float:
    return -math.log(2 + (left * 7 + right * 13) % 11)


class ConstantScorer:
    def __init__(self, log_prob: float) -> None:
        self.log_prob = log_prob

    def score(self, documents: Sequence[Int32]) -> list[tuple[float, int]]:
        return [(self.log_prob * (len(d) - 1), len(d) - 1) for d in documents]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(4, 12), st.integers(1, 2))
def test_windows_score_each_token_once(document: list[int], window: int, overlap: int) -> None:
    scorer = BigramScorer(window)
    tokens = np.array(document, dtype=np.int32)

    whole = sum(bigram(a, b) for a, b in pairwise(document))
    expected = math.exp(-whole / (len(document) - 1)) if len(document) > 1 else math.inf
    plain = Windows(window=window, overlap=overlap)
    assert perplexities([tokens], scorer, plain) == [pytest.approx(expected)]

    whole += bigram(BOS, document[0])
    expected = math.exp(-whole / len(document))
    with_bos = Windows(window=window, overlap=overlap, bos_id=BOS)
    assert perplexities([tokens], scorer, with_bos) == [pytest.approx(expected)]


def test_sums_are_added_not_means_averaged() -> None:
    """9 tokens in windows of 4 with 1 of overlap: 3 + 3 + 2 predictions of 8."""
    document = np.arange(9, dtype=np.int32)
    pieces = [(p.tolist(), sign) for p, sign in Windows(window=4, overlap=1).pieces(document)]
    assert pieces == [
        ([0, 1, 2, 3], 1), ([3, 4, 5, 6], 1), ([3], -1), ([6, 7, 8], 1), ([6], -1),
    ]  # fmt: skip


def test_unusable_scores_are_infinite() -> None:
    documents = [np.arange(5, dtype=np.int32)]
    for log_prob in (math.nan, -math.inf):
        scorer = ConstantScorer(log_prob)
        assert perplexities(documents, scorer, Windows(window=8, overlap=1)) == [math.inf]
    assert math.isfinite(
        perplexities(documents, ConstantScorer(-1e9), Windows(window=8, overlap=1))[0]
    )


def test_the_lowest_stay_in_their_order() -> None:
    found = [5.0, 2.0, math.inf, 3.0, 2.0]
    assert choose_lowest(found) == [0, 1, 3, 4]
    assert choose_lowest(found, keep=2) == [1, 4]
    assert choose_lowest(found, keep=1) == [1]
    assert choose_lowest(found, max_perplexity=3.0) == [1, 3, 4]
    assert choose_lowest(found, keep=2, max_perplexity=1.5) == []


@pytest.mark.parametrize(("window", "overlap", "bos_id"), [(4, 0, None), (4, 4, None), (4, 3, 1)])
def test_windows_that_do_not_move_are_refused(window: int, overlap: int, bos_id: object) -> None:
    with pytest.raises(ConfigError, match="overlap"):
        Windows(window=window, overlap=overlap, bos_id=bos_id)  # type: ignore[arg-type]
