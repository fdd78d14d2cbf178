from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.corpus.documents import (
    Chat,
    Document,
    Message,
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


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "bad JSON line"),
        (b"[]", "bad JSON line"),
        (b'"text"', "bad JSON line"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": 1}', "no text field"),
        (b'{"prompt": "a"}', "no text field"),
        (b"{}", "no text field"),
        (b'{"messages": []}', "bad chat"),
        (b'{"messages": "hi"}', "bad chat"),
        (b'{"messages": [{"role": "narrator", "content": "a"}]}', "bad chat"),
        (b'{"messages": [{"role": "user", "content": [{"image_url": "u"}]}]}', "bad chat"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "chat without an answer"),
    ],
)
def test_bad_lines_are_reported_and_the_rest_is_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b'\n{"text": "good"}\n')
    assert list(read_documents([path])) == [
        Unreadable(f"{path}:1", reason),
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


TURNS = (Message("user", "2 + 2?"), Message("assistant", "4"))


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                {"role": "user", "content": "2 + 2?"},
                {"role": "assistant", "content": "4"},
            ]
        },
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {
            "prompt": "the field of the chat is taken",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},
                {"role": "assistant", "content": "4"},
            ],
        },
    ],
)
def test_chats_of_both_kinds_are_read(tmp_path: Path, row: dict) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    assert list(read_documents([path])) == [Chat(f"{path}:1", TURNS)]


def test_rows_of_parquet_files_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    turns = [{"role": one.role, "content": one.content} for one in TURNS]
    chats, texts, bad = (tmp_path / f"{name}.parquet" for name in ("chats", "texts", "bad"))
    parquet.write_table(arrow.Table.from_pylist([{"messages": turns, "id": 1}]), chats)
    rows = [{"content": "one", "stars": 3}, {"content": None, "stars": 4}]
    parquet.write_table(arrow.Table.from_pylist(rows), texts)
    bad.write_bytes(b"no table")
    assert list(read_documents([chats, texts, bad])) == [
        Chat(f"{chats}:1", TURNS),
        Document(f"{texts}:1", "one"),
        Unreadable(f"{texts}:2", "no text field"),
        Unreadable(f"{bad}:1", "bad parquet file"),
    ]


def test_parquet_without_pyarrow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.touch()
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'draftline\[corpus\]'"):
        list(read_documents([path]))
