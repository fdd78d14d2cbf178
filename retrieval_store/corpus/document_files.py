"""Reads corpus files; parquet needs pyarrow (`pip install 'draftline[corpus]'`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .document_rows import FIELDS, read_row
from .documents import Chat, Document, Unreadable

# Rows in memory at once.
ROWS_AT_ONCE = 1024


def parquet_rows(file: Path) -> Iterator[Document | Chat | Unreadable]:
    """The documents of a parquet file, one a row, named `FILE:ROW` from 1.

    Only the columns that `read_row` knows are read. Raises `ConfigError` where pyarrow is missing.
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


SUFFIXES = (".jsonl", ".md", ".parquet", ".py", ".txt")

Found = Document | Chat | Unreadable


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
