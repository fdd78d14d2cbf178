from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from draftline.core.arrays import Float32, Int32
from draftline.core.errors import ConfigError
from draftline.retrieval_store.corpus.documents import TokenizedDocument
from draftline.retrieval_store.corpus.refine import (
    Scorer,
    Windows,
    decode_probs,
    encode_probs,
    score_documents,
)
from hypothesis import given
from hypothesis import strategies as st

BOS = 1000


class BigramScorer:
    """A model that sees one token back, so that windows with an overlap lose nothing."""

    def __init__(self, window: int = 1000) -> None:
        self.window = window
        self.num_scored = 0

    def log_probs(self, documents: Sequence[Int32]) -> list[Float32]:
        assert all(1 <= len(document) <= self.window for document in documents)
        self.num_scored += sum(map(len, documents))
        return [
            np.array([bigram(a, b) for a, b in pairwise(d.tolist())], dtype=np.float32)
            for d in documents
        ]


def bigram(left: int, right: int) -> float:
    return -math.log(2 + (left * 7 + right * 13) % 11)


class ConstantScorer:
    def __init__(self, log_prob: float) -> None:
        self.log_prob = log_prob

    def log_probs(self, documents: Sequence[Int32]) -> list[Float32]:
        return [np.full(len(d) - 1, self.log_prob, dtype=np.float32) for d in documents]


def perplexity(
    document: Sequence[int], scorer: Scorer, windows: Windows, mask: Sequence[bool] | None = None
) -> float:
    ids = np.array(document, dtype=np.int32)
    is_scored = None if mask is None else np.array(mask, dtype=np.bool_)
    [score] = score_documents([TokenizedDocument(ids, is_scored)], scorer, windows)
    return score.perplexity


LENGTHS = st.tuples(st.integers(4, 12), st.integers(1, 2), st.booleans())


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=60), LENGTHS)
def test_windows_score_each_wanted_token_once(
    document: list[tuple[int, bool]], lengths: tuple[int, int, bool]
) -> None:
    window, overlap, has_bos = lengths
    ids = [token for token, _ in document]
    mask = [is_scored for _, is_scored in document]
    windows = Windows(window=window, overlap=overlap, bos_id=BOS if has_bos else None)
    before = [BOS, *ids] if has_bos else ids
    pairs = list(pairwise(before))
    is_wanted = mask if has_bos else mask[1:]
    wanted = [bigram(*pair) for pair, flag in zip(pairs, is_wanted, strict=True) if flag]

    whole = math.exp(-sum(bigram(*pair) for pair in pairs) / len(pairs)) if pairs else math.inf
    assert perplexity(ids, BigramScorer(window), windows) == pytest.approx(whole, rel=1e-5)
    answers = math.exp(-sum(wanted) / len(wanted)) if wanted else math.inf
    assert perplexity(ids, BigramScorer(window), windows, mask) == pytest.approx(answers, rel=1e-5)


def test_windows_follow_one_another_and_score_after_their_overlap() -> None:
    pieces = list(Windows(window=4, overlap=1).pieces(9))
    assert pieces == [(0, 4, 1), (3, 7, 4), (6, 9, 7)]
    pieces = list(Windows(window=4, overlap=1, bos_id=BOS).pieces(6))
    assert pieces == [(0, 3, 0), (2, 5, 3), (4, 6, 5)]


def test_windows_of_a_question_alone_are_not_scored() -> None:
    scorer = BigramScorer()
    perplexity(range(9), scorer, Windows(window=4, overlap=1), [False] * 8 + [True])
    assert scorer.num_scored == 3


def test_unusable_scores_are_infinite() -> None:
    windows = Windows(window=8, overlap=1)
    for log_prob in (math.nan, -math.inf):
        assert perplexity(range(5), ConstantScorer(log_prob), windows) == math.inf
    assert math.isfinite(perplexity(range(5), ConstantScorer(-1e9), windows))


@pytest.mark.parametrize(("window", "overlap", "bos_id"), [(4, 0, None), (4, 4, None), (4, 3, 1)])
def test_windows_that_do_not_move_are_refused(window: int, overlap: int, bos_id: object) -> None:
    with pytest.raises(ConfigError, match="overlap"):
        Windows(window=window, overlap=overlap, bos_id=bos_id)  # type: ignore[arg-type]


def test_each_token_has_its_probability_wherever_its_window_begins() -> None:
    """0 of what is not scored, as of the first token without one before it."""
    ids, mask = np.arange(9, dtype=np.int32), np.arange(9) % 3 > 0
    document = TokenizedDocument(ids, mask)
    for bos_id in (None, BOS):
        windows = Windows(window=4, overlap=1, bos_id=bos_id)
        before = [-1 if bos_id is None else bos_id, *range(8)]
        exact = [
            math.exp(bigram(left, right)) for left, right in zip(before, range(9), strict=True)
        ]
        exact[0] = 0.0 if bos_id is None else exact[0]
        [whole] = score_documents([TokenizedDocument(ids)], BigramScorer(4), windows)
        [masked] = score_documents([document], BigramScorer(4), windows)
        assert whole.token_probs is not None
        assert masked.token_probs is not None
        assert decode_probs(whole.token_probs) == pytest.approx(exact, abs=0.004)
        assert decode_probs(masked.token_probs) == pytest.approx(exact * mask, abs=0.004)


@given(st.lists(st.floats(0, 1), max_size=20))
def test_a_probability_is_a_byte_that_is_near_to_it(probs: list[float]) -> None:
    exact = np.array(probs)
    with np.errstate(divide="ignore"):
        codes = encode_probs(np.log(exact)).tobytes()
    assert len(codes) == len(probs)
    assert decode_probs(codes) == pytest.approx(exact, abs=0.004)
    assert decode_probs(encode_probs(np.log(decode_probs(b"\x01\xff"))).tobytes()) == (
        pytest.approx([1 / 255**2, 1.0])
    )


def test_what_is_no_number_has_no_probability() -> None:
    codes = encode_probs(np.array([math.nan, -math.inf, -1e30, 0.0]))
    assert codes.tolist() == [0, 0, 0, 255]
