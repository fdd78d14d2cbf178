"""Which documents stay."""

from __future__ import annotations

import math

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.corpus.documents import TokenizedDocument
from draftline.retrieval_store.corpus.refine import Score, encode_probs
from draftline.retrieval_store.corpus.selection import (
    COVERAGE,
    LOWEST,
    NGRAM,
    SELECTIONS,
    TOKEN_COVERAGE,
    choose,
    ranking,
    resolve_selection,
)
from hypothesis import given
from hypothesis import strategies as st


def text(ids: object) -> TokenizedDocument:
    return TokenizedDocument(np.array(ids, dtype=np.int32))


def score(perplexity: float) -> Score:
    return Score(-math.log(perplexity), 1)


def judged(probs: np.ndarray) -> Score:
    with np.errstate(divide="ignore"):
        log_probs = np.log(probs)
    return Score(-float(len(probs)), len(probs), encode_probs(log_probs).tobytes())


def test_the_lowest_stay_in_their_order() -> None:
    found = [score(one) for one in (5.0, 2.0, math.inf, 3.0, 2.0)]
    documents = [text([1])] * len(found)

    def lowest(**limits: float) -> list[int]:
        return choose(documents, found, LOWEST, **limits)  # type: ignore[arg-type]

    assert lowest() == [0, 1, 3, 4]
    assert lowest(keep=2) == [1, 4]
    assert lowest(keep=1) == [1]
    assert lowest(max_perplexity=3.1) == [1, 3, 4]
    assert lowest(keep=2, max_perplexity=1.5) == []
    assert list(ranking(documents, found, LOWEST)) == [1, 4, 3, 0]


def test_what_covers_most_stays() -> None:
    """Of two alike one stays; what is not likely enough never does."""
    spans = [range(20), range(20), range(100, 120), range(200, 220), range(300, 320)]
    documents = [text(one) for one in spans]
    found = [score(one) for one in (2.0, 3.0, 5.0, 9.0, math.inf)]

    def covering(**limits: float) -> list[int]:
        return choose(documents, found, COVERAGE, **limits)  # type: ignore[arg-type]

    assert covering(keep=2) == [0, 2]
    assert covering(keep=3) == [0, 2, 3]
    assert covering(keep=3, max_perplexity=6.0) == [0, 1, 2]
    assert covering(keep=9) == [0, 1, 2, 3]
    assert covering(keep=2, max_perplexity=1.0) == []


def test_tokens_that_the_target_would_say_decide() -> None:
    """Of the same perplexity one has its probable tokens where the other texts have them, too."""
    common, rare = range(20), range(100, 120)
    documents = [text([*common]), text([*common, *rare]), text([*common, *range(50, 70)])]
    high, low = np.full(20, 0.9), np.full(20, 0.1)
    found = [
        judged(high), judged(np.concatenate([high, low])), judged(np.concatenate([low, high])),
    ]  # fmt: skip
    assert list(ranking(documents, found, TOKEN_COVERAGE)) == [0, 2, 1]
    assert choose(documents, found, TOKEN_COVERAGE, keep=2) == [0, 2]
    assert list(ranking(documents, found, COVERAGE)) == [1, 2, 0]
    assert choose([], [], TOKEN_COVERAGE, keep=2) == []


def grams(ids: np.ndarray, codes: np.ndarray) -> dict[tuple[int, ...], float]:
    """Each n-gram's probability where it stands first, by brute force."""
    found: dict[tuple[int, ...], float] = {}
    for end in range(NGRAM, len(ids) + 1):
        found.setdefault(tuple(ids[end - NGRAM : end].tolist()), (int(codes[end - 1]) / 255) ** 2)
    return found


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 10))
def test_the_choice_is_greedy(seed: int, num_words: int, num_documents: int) -> None:
    """None that is left ever adds more for its tokens than the one that is taken."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 1 + num_words, rng.integers(1, 40)) for _ in range(num_documents)]
    codes = [rng.integers(0, 256, len(one)).astype(np.uint8) for one in ids]
    found = [Score(-1.0, 1, one.tobytes()) for one in codes]
    order = list(ranking([text(one) for one in ids], found, TOKEN_COVERAGE))
    assert sorted(order) == list(range(num_documents))
    covered: set[tuple[int, ...]] = set()

    def gain(index: int) -> float:
        own = grams(ids[index], codes[index]).items()
        return sum(worth for gram, worth in own if gram not in covered) / len(ids[index])

    for place, index in enumerate(order):
        assert gain(index) >= max(map(gain, order[place:])) - 1e-9
        covered |= grams(ids[index], codes[index]).keys()


def test_the_selection_without_a_name_depends_on_what_is_asked() -> None:
    assert resolve_selection(None, None) == LOWEST
    assert resolve_selection(None, 3) == TOKEN_COVERAGE
    assert resolve_selection(LOWEST, None) == LOWEST
    assert [resolve_selection(one, 3) for one in SELECTIONS] == list(SELECTIONS)
    for name in (COVERAGE, TOKEN_COVERAGE):
        with pytest.raises(ConfigError, match=f"{name} needs keep"):
            resolve_selection(name, None)
    with pytest.raises(ConfigError, match="lowest, coverage, token_coverage, got 'most'"):
        resolve_selection("most", 3)
