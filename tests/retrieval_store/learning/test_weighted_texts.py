from __future__ import annotations

import numpy as np
from draftline.core.arrays import Int32
from draftline.retrieval_store.delta.delta_log import DeltaEvent, text_digest
from draftline.retrieval_store.delta.weighted_texts import LEAST_WEIGHT, MAX_COPIES, WeightedTexts
from hypothesis import given
from hypothesis import strategies as st

HALF_LIFE = 10.0


def text(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


def learned(*tokens: int, weight: float = 1.0) -> DeltaEvent:
    return DeltaEvent(text_digest(text(*tokens)), weight, text(*tokens))


def used(*tokens: int, weight: float = 1.0) -> DeltaEvent:
    return DeltaEvent(text_digest(text(*tokens)), weight)


def kept(texts: WeightedTexts, time: float) -> list[list[int]]:
    return [tokens.tolist() for tokens in texts.documents(time)]


def test_use_raises_a_weight_and_time_halves_it() -> None:
    texts = WeightedTexts(100, HALF_LIFE)
    texts.apply(learned(1, 2, 3), 0.0)
    texts.apply(used(1, 2, 3, weight=3.0), 0.0)
    digest = text_digest(text(1, 2, 3))
    assert texts.weights(0.0)[digest] == 4.0
    assert texts.weights(10.0)[digest] == 2.0
    texts.apply(used(1, 2, 3), 10.0)
    assert texts.weights(20.0)[digest] == 1.5


def test_a_weight_is_a_number_of_copies() -> None:
    texts = WeightedTexts(100, HALF_LIFE)
    texts.apply(learned(1, 2, 3, weight=2.0), 0.0)
    texts.apply(learned(4, 5, 6, weight=99.0), 0.0)
    texts.apply(learned(7, 8, 9, weight=0.1), 0.0)
    assert kept(texts, 0.0) == [[1, 2, 3]] * 2 + [[4, 5, 6]] * MAX_COPIES + [[7, 8, 9]]
    assert kept(texts, 10.0)[:2] == [[1, 2, 3], [4, 5, 6]]


def test_the_least_used_goes_first_and_of_equals_the_oldest() -> None:
    texts = WeightedTexts(6, HALF_LIFE)
    texts.apply(learned(1, 2, 3), 0.0)
    texts.apply(learned(4, 5, 6), 0.0)
    texts.apply(learned(7, 8, 9), 0.0)
    texts.apply(used(1, 2, 3), 0.0)
    assert texts.prune(0.0)
    assert not texts.prune(0.0)
    assert kept(texts, 0.0) == [[1, 2, 3]] * 2 + [[7, 8, 9]]


def test_what_nobody_uses_is_forgotten_in_the_end() -> None:
    texts = WeightedTexts(100, HALF_LIFE)
    texts.apply(learned(1, 2, 3), 0.0)
    texts.apply(learned(4, 5, 6), 0.0)
    texts.apply(used(4, 5, 6), 50.0)
    half_lives = -np.log2(LEAST_WEIGHT)
    texts.prune(HALF_LIFE * half_lives)
    assert len(texts) == 2
    texts.prune(HALF_LIFE * half_lives + 0.1)
    assert kept(texts, 61.0) == [[4, 5, 6]]
    texts.prune(61.0, oldest=55.0)
    assert (len(texts), texts.num_tokens) == (0, 0)


def test_weight_for_an_unknown_text_and_texts_that_never_fit_are_ignored() -> None:
    texts = WeightedTexts(4, HALF_LIFE)
    texts.apply(used(1, 2, 3), 0.0)
    texts.apply(learned(1, 2, 3, 4, 5), 0.0)
    texts.apply(learned(), 0.0)
    assert len(texts) == 0


def test_runs_are_found_at_whole_tokens_only() -> None:
    texts = WeightedTexts(100, HALF_LIFE)
    # As bytes, 1 and then 0 hold 256 at an offset of one byte.
    texts.apply(learned(256, 0, 7), 0.0)
    assert texts.holding(text(256, 0)) == {text_digest(text(256, 0, 7))}
    assert texts.holding(text(0, 7)) != set()
    assert texts.holding(text(1, 0)) == set()


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=5),
            st.floats(0.1, 5),
            st.booleans(),
            st.floats(0, 50),
        ),
        max_size=30,
    ),
    st.integers(1, 20),
)
def test_the_bound_holds_and_counts_agree(
    events: list[tuple[list[int], float, bool, float]], most: int
) -> None:
    texts = WeightedTexts(most, HALF_LIFE)
    for tokens, weight, is_new, time in events:
        event = learned(*tokens, weight=weight) if is_new else used(*tokens, weight=weight)
        texts.apply(event, time)
        texts.prune(50.0)
        unique = {tuple(tokens) for tokens in kept(texts, 50.0)}
        assert len(unique) == len(texts)
        assert sum(map(len, unique)) == texts.num_tokens <= most
