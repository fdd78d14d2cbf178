from __future__ import annotations

from pathlib import Path

import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.documents import (
    Document,
    DocumentFilter,
    DocumentRules,
    Unreadable,
    read_documents,
)


def test_each_kind_of_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "a.txt").write_text("grüße", encoding="utf-8")
    (tmp_path / "skipped.bin").write_bytes(b"\0")
    lines = ['{"text": "one"}', "", '{"prompt": "two ", "completion": "three"}']
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    assert list(read_documents([tmp_path])) == [
        Document(str(tmp_path / "a.txt"), "grüße"),
        Document(str(tmp_path / "b.py"), "x = 1\n"),
        Document(f"{tmp_path / 'c.jsonl'}:1", "one"),
        Document(f"{tmp_path / 'c.jsonl'}:3", "two three"),
    ]


@pytest.mark.parametrize("line", ["{", "[]", '"text"', '{"text": 1}', '{"prompt": "a"}', "{}"])
def test_bad_lines_are_reported_and_the_rest_is_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{line}\n{{"text": "good"}}\n')
    assert list(read_documents([path])) == [
        Unreadable(f"{path}:1", "bad JSON line"),
        Document(f"{path}:2", "good"),
    ]


def test_a_file_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe")
    assert list(read_documents([path])) == [Unreadable(str(path), "not UTF-8")]


def test_paths_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    for path, reason in (
        (tmp_path / "none.txt", "does not exist"),
        (tmp_path / "a.bin", "convert it"),
        (tmp_path, "holds no"),
    ):
        with pytest.raises(ConfigError, match=reason):
            list(read_documents([path]))


def test_copies_and_degenerate_texts_are_dropped() -> None:
    sieve = DocumentFilter(DocumentRules(min_tokens=3, min_compression_ratio=0.05))
    assert sieve.accepts_text("def a():\n    return 1")
    assert not sieve.accepts_text("def a():   return 1\n")
    assert not sieve.accepts_text("# licence\n" * 1000)
    assert sieve.accepts_text("")
    assert sieve.accepts_length(3)
    assert not sieve.accepts_length(2)
    assert sieve.dropped == {"duplicate": 1, "repetitive": 1, "too short": 1}
