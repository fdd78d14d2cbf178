from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from draftline.core.arrays import Float32, Int32
from draftline.retrieval_store.corpus.documents import TokenizedDocument
from draftline.retrieval_store.corpus.refine import Windows, decode_probs
from draftline.retrieval_store.corpus.scoring import (
    BATCH_TOKENS,
    OLD_HEADER,
    CorpusScorer,
    ScoreJournal,
    batches,
    score_key,
)
from hypothesis import given
from hypothesis import strategies as st

WINDOWS = Windows(window=32, overlap=4, bos_id=0)


def document(*ids: int, mask: Sequence[bool] | None = None) -> TokenizedDocument:
    is_scored = None if mask is None else np.array(mask, dtype=np.bool_)
    return TokenizedDocument(np.array(ids, dtype=np.int32), is_scored)


DOCUMENTS = [document(*range(n, n + 20 + n % 7)) for n in range(40)]


class CountingScorer:
    """Says the log-probability of a token is its number; counts windows."""

    def __init__(self) -> None:
        self.num_windows = 0

    def log_probs(self, documents: Sequence[Int32]) -> list[Float32]:
        self.num_windows += len(documents)
        return [-one[1:].astype(np.float32) for one in documents]


def corpus_scorer(journal: ScoreJournal | None, model_hash: str = "m") -> CorpusScorer:
    return CorpusScorer(
        scorer=CountingScorer(), windows=WINDOWS, model_hash=model_hash, journal=journal
    )


@given(st.lists(st.integers(1, 2 * BATCH_TOKENS), max_size=30))
def test_batches_hold_each_document_once_the_longest_first(lengths: list[int]) -> None:
    ids = np.zeros(2 * BATCH_TOKENS, dtype=np.int32)
    documents = [TokenizedDocument(ids[:length]) for length in lengths]
    found = list(batches(documents, range(len(lengths))))
    order = [index for batch in found for index in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)
    for batch in found:
        assert sum(lengths[index] for index in batch[:-1]) < BATCH_TOKENS
    for batch in found[:-1]:
        assert sum(lengths[index] for index in batch) >= BATCH_TOKENS


def test_what_a_journal_holds_is_not_scored_again(tmp_path: Path) -> None:
    plain = corpus_scorer(None)
    advanced: list[int] = []
    expected = plain.scores(DOCUMENTS, advanced.append)
    assert [score.log_prob for score in expected] == [-float(d.ids.sum()) for d in DOCUMENTS]
    assert sum(advanced) == sum(len(d.ids) for d in DOCUMENTS)

    path = tmp_path / "new" / "a.scores"
    with ScoreJournal(path) as journal:
        first = corpus_scorer(journal)
        assert first.scores(DOCUMENTS[:25], lambda _: None) == expected[:25]
        assert first.scorer.num_windows == 25
    with path.open("ab") as file:
        file.write(b"0123456789abcdef -1")
    with ScoreJournal(path) as journal:
        second = corpus_scorer(journal)
        assert second.scores(DOCUMENTS, lambda _: None) == expected
        assert second.scorer.num_windows == len(DOCUMENTS) - 25
        assert journal.num_scores == len(DOCUMENTS)
        other = corpus_scorer(journal, "another model")
        other.scores(DOCUMENTS, lambda _: None)
        assert other.scorer.num_windows == len(DOCUMENTS)


def test_probabilities_outlive_a_build_that_did_not_ask_for_them(tmp_path: Path) -> None:
    expected = corpus_scorer(None).scores(DOCUMENTS, lambda _: None, with_probs=True)
    for document_, score in zip(DOCUMENTS, expected, strict=True):
        exact = np.exp(-document_.ids.astype(np.float64))
        assert decode_probs(score.token_probs or b"") == pytest.approx(exact, abs=0.004)
    with ScoreJournal(tmp_path / "a") as journal:
        without = corpus_scorer(journal).scores(DOCUMENTS[:25], lambda _: None)
        assert {score.token_probs for score in without} == {None}
        # Those of this build are found at once.
        again = corpus_scorer(journal)
        assert again.scores(DOCUMENTS[:25], lambda _: None, with_probs=True) == expected[:25]
        assert again.scorer.num_windows == 0
    with ScoreJournal(tmp_path / "a") as journal:
        resumed = corpus_scorer(journal)
        assert resumed.scores(DOCUMENTS, lambda _: None, with_probs=True) == expected
        assert resumed.scorer.num_windows == len(DOCUMENTS) - 25
        assert resumed.scores(DOCUMENTS, lambda _: None) == [
            score._replace(token_probs=None) for score in expected
        ]


def old_journal(path: Path, documents: Sequence[TokenizedDocument]) -> None:
    """As it was written before there were probabilities."""
    scores = corpus_scorer(None).scores(documents, lambda _: None)
    keys = [score_key(document_, WINDOWS, "m") for document_ in documents]
    lines = [
        f"{key} {score.log_prob!r} {score.num_tokens}\n"
        for key, score in zip(keys, scores, strict=True)
    ]
    path.write_bytes(OLD_HEADER + "".join(lines).encode())


def test_an_old_journal_spares_what_needs_no_probabilities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    old_journal(path, DOCUMENTS[:30])
    expected = corpus_scorer(None).scores(DOCUMENTS, lambda _: None, with_probs=True)
    plain = [score._replace(token_probs=None) for score in expected]
    with ScoreJournal(path) as journal, caplog.at_level(logging.WARNING):
        scorer = corpus_scorer(journal)
        assert scorer.scores(DOCUMENTS[:30], lambda _: None) == plain[:30]
        assert scorer.scorer.num_windows == 0
        assert caplog.messages == []
        assert scorer.scores(DOCUMENTS, lambda _: None, with_probs=True) == expected
        assert scorer.scorer.num_windows == len(DOCUMENTS)
    [told] = caplog.messages
    assert f"event=scored_again documents=30 journal={path}" in told
    with ScoreJournal(path) as journal:
        scorer = corpus_scorer(journal)
        assert journal.num_scores == len(DOCUMENTS)
        assert scorer.scores(DOCUMENTS, lambda _: None, with_probs=True) == expected
        assert scorer.scorer.num_windows == 0
    assert len(caplog.messages) == 1


def test_a_journal_takes_little_more_than_a_byte_a_token(tmp_path: Path) -> None:
    document_ = document(*range(3000))
    windows = Windows(window=4096, overlap=4, bos_id=0)
    with ScoreJournal(tmp_path / "a") as journal:
        scorer = CorpusScorer(
            scorer=CountingScorer(), windows=windows, model_hash="m", journal=journal
        )
        [score] = scorer.scores([document_], lambda _: None, with_probs=True)
    assert b64encode(score.token_probs or b"") in (tmp_path / "a").read_bytes()
    assert (tmp_path / "a").stat().st_size < 1.4 * 3000


def test_keys_tell_whatever_changes_a_score() -> None:
    one = document(1, 2, 3)
    others = [
        score_key(document(1, 2, 4), WINDOWS, "m"),
        score_key(document(1, 2, 3, mask=[True] * 3), WINDOWS, "m"),
        score_key(one, WINDOWS, "other"),
        score_key(one, Windows(window=33, overlap=4, bos_id=0), "m"),
        score_key(one, Windows(window=32, overlap=5, bos_id=0), "m"),
        score_key(one, Windows(window=32, overlap=4), "m"),
    ]
    assert len({score_key(one, WINDOWS, "m"), *others}) == 7
    assert score_key(document(1, 2, 3), WINDOWS, "m") not in others
