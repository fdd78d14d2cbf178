"""Documents of parquet files; needs pyarrow (`pip install 'draftline[corpus]'`)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .corpus.document_rows import FIELDS, read_row
from .corpus.documents import Chat, Document, Unreadable

# Rows in memory at once.
ROWS_AT_ONCE = 1024


def parquet_rows(file: Path) -> Iterator[Document | Chat | Unreadable]:
    """One document a row, named `FILE:ROW` from 1. Only the columns that `read_row` knows are read.

    Raises `ConfigError` where pyarrow is missing.
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
