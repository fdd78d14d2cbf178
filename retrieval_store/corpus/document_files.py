"""Reads corpus files; parquet needs pyarrow (`pip install 'draftline[corpus]'`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .documents import Chat, Document, Message, Unreadable

# Rows in memory at once.
ROWS_AT_ONCE = 1024
SUFFIXES = (".jsonl", ".md", ".parquet", ".py", ".txt")
Found = Document | Chat | Unreadable
CHAT_FIELDS = ("messages", "conversations")
# Fields whose joined texts make a document; the first entry whose fields are in the row is used.
TEXT_FIELDS = (("text",), ("content",), ("prompt", "completion"))
FIELDS = (*CHAT_FIELDS, *(name for names in TEXT_FIELDS for name in names))
# Names that data sets use for the speakers, including ShareGPT's.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip


def parquet_rows(file: Path) -> Iterator[Document | Chat | Unreadable]:
    """The documents of a parquet file, one a row, named `FILE:ROW` from 1.

    Reads only the columns that `read_row` uses. Raises `ConfigError` where pyarrow is missing.
    """
    try:
        arrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        message = f"{file} needs pyarrow: pip install 'draftline[corpus]'"
        raise ConfigError("input", message) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for row in _rows(table):
                number += 1
                yield read_row(f"{file}:{number}", row)
    except (arrow.ArrowException, OSError):
        yield Unreadable(f"{file}:{number + 1}", "bad parquet file")


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    columns = [name for name in table.schema_arrow.names if name in FIELDS]
    for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
        yield from batch.to_pylist()


def read_documents(paths: Iterable[Path]) -> Iterator[Found]:
    """The documents of files, and of the files in folders, sorted by path.

    .txt, .md and .py files are one document each; a line of a .jsonl file and a row of a .parquet
    file is one, as `read_row` takes it. Files, lines and rows that cannot be read are `Unreadable`.
    Raises `ConfigError` for a path that does not exist or is of another kind, and for .parquet
    files where pyarrow is missing.
    """
    for path in paths:
        for file in _files_of(path):
            if file.suffix == ".jsonl":
                yield from _json_lines(file)
            elif file.suffix == ".parquet":
                yield from parquet_rows(file)
            else:
                yield _whole(file)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        if not files:
            raise ConfigError("input", f"{path} holds no {', '.join(SUFFIXES)} file")
        return sorted(files)
    if not path.is_file():
        raise ConfigError("input", f"{path} does not exist")
    if path.suffix not in SUFFIXES:
        raise ConfigError("input", f"{path} is not one of {', '.join(SUFFIXES)}; convert it")
    return [path]


def _whole(file: Path) -> Document | Unreadable:
    try:
        return Document(str(file), file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return Unreadable(str(file), "not UTF-8")


def _json_lines(file: Path) -> Iterator[Found]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_line(f"{file}:{number}", line)


def _json_line(name: str, line: bytes) -> Found:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Unreadable(name, "not UTF-8")
    except json.JSONDecodeError:
        return Unreadable(name, "bad JSON line")
    return read_row(name, row) if isinstance(row, dict) else Unreadable(name, "bad JSON line")


def read_row(name: str, row: Mapping[str, Any]) -> Document | Chat | Unreadable:
    """The document of one row of named fields.

    A chat has `messages` (of `role` and `content`) or `conversations` (ShareGPT: of `from` and
    `value`); a text has `text`, `content`, or `prompt` and `completion`. Any other row gives
    `Unreadable`.
    """
    for field in CHAT_FIELDS:
        if row.get(field) is not None:
            return _chat(name, row[field])
    for fields in TEXT_FIELDS:
        parts = [row.get(field) for field in fields]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return Document(name, "".join(texts))
    return Unreadable(name, "no text field")


def _chat(name: str, entries: Any) -> Chat | Unreadable:
    turns = entries if isinstance(entries, list) else []
    messages = tuple(message for turn in turns if (message := _message(turn)) is not None)
    if not messages or len(messages) < len(turns):
        return Unreadable(name, "bad chat")
    if all(message.role != "assistant" for message in messages):
        return Unreadable(name, "chat without an answer")
    return Chat(name, messages)


def _message(entry: Any) -> Message | None:
    if not isinstance(entry, dict):
        return None
    role = ROLES.get(str(entry.get("role") or entry.get("from")).lower())
    content = _content(entry["content"] if "content" in entry else entry.get("value"))
    return None if role is None or content is None else Message(role, content)


def _content(value: Any) -> str | None:
    """A text, or the texts of a list of parts; None for anything else, such as a picture."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    texts = [part.get("text") for part in value if isinstance(part, dict)]
    parts = [text for text in texts if isinstance(text, str)]
    return "".join(parts) if parts and len(parts) == len(value) else None
