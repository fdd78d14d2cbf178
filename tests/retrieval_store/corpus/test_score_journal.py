"""The file of scores."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.corpus.refine import Score
from draftline.retrieval_store.corpus.scoring import HEADER, OLD_HEADER, ScoreJournal
from hypothesis import given
from hypothesis import strategies as st

KEY, OTHER_KEY = "0" * 32, "1" * 32
SCORES = {KEY: Score(-1.5, 3, b"abc"), OTHER_KEY: Score(-2.5, 4, b"defg")}


def held(journal: ScoreJournal, keys: Mapping[str, Score]) -> dict[str, Score]:
    """What the journal has of the scores of these keys."""
    found: dict[str, Score] = {}
    for key, given_score in keys.items():
        score = journal.score(key)
        if score is not None:
            probs = journal.token_probs(key, len(given_score.token_probs or b""))
            found[key] = score._replace(token_probs=probs)
    return found


SCORE = st.builds(
    Score, st.floats(allow_nan=False), st.integers(0, 10**9), st.none() | st.binary(max_size=40)
)


@given(st.lists(SCORE, max_size=5), st.integers(0, 5))
def test_scores_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, found: list[Score], first: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "a.scores"
    items = [(f"{index:032x}", one) for index, one in enumerate(found)]
    scores = dict(items)
    with ScoreJournal(path) as journal:
        journal.add(dict(items[:first]))
        journal.add(dict(items[first:]))
        assert held(journal, scores) == scores
    with ScoreJournal(path) as journal:
        assert held(journal, scores) == scores
        assert journal.num_scores == len(scores)
        assert journal.score("f" * 32) is None


def test_scores_that_are_no_numbers_come_back(tmp_path: Path) -> None:
    with ScoreJournal(tmp_path / "a") as journal:
        journal.add({KEY: Score(math.nan, 3)})
    with ScoreJournal(tmp_path / "a") as journal:
        score = journal.score(KEY)
        assert score is not None
        assert score.perplexity == math.inf


@pytest.mark.parametrize("header", [HEADER, OLD_HEADER])
@pytest.mark.parametrize("length", range(1, len(HEADER) + 50, 6))
def test_a_journal_that_was_torn_anywhere_goes_on(
    tmp_path: Path, length: int, header: bytes
) -> None:
    path = tmp_path / "a"
    lines = f"{KEY} -1.5 3 YWJj\n{OTHER_KEY} -2.5 4 ZGVmZw==\n".encode()
    path.write_bytes((header + lines)[:length])
    first_line = len(header) + lines.index(b"\n") + 1
    with ScoreJournal(path) as journal:
        assert held(journal, SCORES) == ({KEY: SCORES[KEY]} if length >= first_line else {})
        journal.add(SCORES)
        assert held(journal, SCORES) == SCORES
    with ScoreJournal(path) as journal:
        assert held(journal, SCORES) == SCORES
    assert path.read_bytes().startswith(HEADER)
    assert path.read_bytes().endswith(lines)


def test_a_later_line_is_in_force(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(OLD_HEADER + f"{KEY} -1.5 3\n".encode())
    with ScoreJournal(path) as journal:
        assert journal.score(KEY) == Score(-1.5, 3)
        assert journal.token_probs(KEY, 3) is None
        journal.add({KEY: SCORES[KEY]})
    with ScoreJournal(path) as journal:
        assert journal.token_probs(KEY, 3) == b"abc"
        assert journal.num_scores == 1


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for content in (b"my only copy", b"draftline scores 3\n"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is no journal of scores"):
            ScoreJournal(path)
        assert path.read_bytes() == content
    with pytest.raises(ConfigError, match="cannot write"):
        ScoreJournal(tmp_path)


@pytest.mark.parametrize(
    "line", [b"what is this", b"what -1", b"\xff -1 2", b"what -1 2 YQ== YQ=="]
)
def test_lines_that_are_no_scores_are_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(HEADER + line + b"\n")
    with pytest.raises(ConfigError, match="corrupt"):
        ScoreJournal(path)
    assert path.read_bytes() == HEADER + line + b"\n"
    # Its lock is free again.
    path.write_bytes(HEADER)
    ScoreJournal(path).close()


@pytest.mark.parametrize("probs", [b"YWJ", b"YWJjZA==", b"Y?Jj"])
def test_probabilities_that_are_none_are_refused(tmp_path: Path, probs: bytes) -> None:
    """Cut short, of another number of tokens, or no base64."""
    path = tmp_path / "a"
    path.write_bytes(HEADER + f"{KEY} -1.5 3 ".encode() + probs + b"\n")
    with ScoreJournal(path) as journal, pytest.raises(ConfigError, match="corrupt"):
        journal.token_probs(KEY, 3)


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with ScoreJournal(tmp_path / "a") as journal:
        journal.add({KEY: SCORES[KEY]})
        full = os.open("/dev/full", os.O_WRONLY)
        number = journal._file.fileno()
        own = os.dup(number)
        os.dup2(full, number)
        with pytest.raises(ConfigError, match=r"cannot write .*No space left"):
            journal.add({OTHER_KEY: SCORES[OTHER_KEY]})
        os.dup2(own, number)
        os.close(own)
        os.close(full)
    with ScoreJournal(tmp_path / "a") as journal:
        assert held(journal, SCORES) == {KEY: SCORES[KEY]}


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with ScoreJournal(tmp_path / "a"), pytest.raises(ConfigError, match="another build writes"):
        ScoreJournal(tmp_path / "a")
    ScoreJournal(tmp_path / "a").close()
