from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from draftline.core.arrays import Float32, Int32
from draftline.core.errors import ConfigError
from draftline.retrieval_store.corpus.documents import TokenizedDocument
from draftline.retrieval_store.corpus.refine import Score, Windows
from draftline.retrieval_store.corpus.scoring import (
    BATCH_TOKENS,
    HEADER,
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
        assert len(journal.scores) == len(DOCUMENTS)
        other = corpus_scorer(journal, "another model")
        other.scores(DOCUMENTS, lambda _: None)
        assert other.scorer.num_windows == len(DOCUMENTS)


@given(st.lists(st.tuples(st.floats(allow_nan=False), st.integers(0, 10**9)), max_size=5))
def test_scores_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[float, int]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "a.scores"
    scores = {f"{index:032x}": Score(*one) for index, one in enumerate(found)}
    with ScoreJournal(path) as journal:
        journal.add(scores)
    with ScoreJournal(path) as journal:
        assert journal.scores == scores


def test_scores_that_are_no_numbers_come_back(tmp_path: Path) -> None:
    with ScoreJournal(tmp_path / "a") as journal:
        journal.add({"0" * 32: Score(math.nan, 3)})
    with ScoreJournal(tmp_path / "a") as journal:
        [score] = journal.scores.values()
        assert score.perplexity == math.inf


@pytest.mark.parametrize("length", range(1, len(HEADER) + 40, 7))
def test_a_journal_that_was_torn_anywhere_goes_on(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a"
    scores = {"0" * 32: Score(-1.5, 3), "1" * 32: Score(-2.5, 4)}
    with ScoreJournal(path) as journal:
        journal.add(scores)
    path.write_bytes(path.read_bytes()[:length])
    with ScoreJournal(path) as journal:
        assert len(journal.scores) == int(length >= len(HEADER) + 40)
        journal.add(scores)
    with ScoreJournal(path) as journal:
        assert journal.scores == scores


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my only copy")
    with pytest.raises(ConfigError, match="is no journal of scores"):
        ScoreJournal(path)
    assert path.read_text() == "my only copy"
    path.write_bytes(HEADER + b"what is this\n")
    with pytest.raises(ConfigError, match="corrupt"):
        ScoreJournal(path)
    with pytest.raises(ConfigError, match="cannot write"):
        ScoreJournal(tmp_path)


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with ScoreJournal(tmp_path / "a"), pytest.raises(ConfigError, match="another build writes"):
        ScoreJournal(tmp_path / "a")
    ScoreJournal(tmp_path / "a").close()


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
