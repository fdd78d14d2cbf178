"""The file of `--trace-steps`: one JSON line a step."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from ..core.errors import ConfigError
from ..core.step_trace import StepRecord

logger = logging.getLogger(__name__)

FIELDS = tuple(field.name for field in fields(StepRecord))


class TraceFile:
    """Writes records as they come; each line is in the file when `write` returns.

    Raises `ConfigError` if the file cannot be written. What it held before is lost. A disk that
    fills up later ends the trace and nothing else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._is_over = False
        try:
            # Opened for good with the first record: an engine that does not start closes nothing.
            path.write_text("")
        except OSError as error:
            raise ConfigError("trace_steps", f"cannot write {path}: {error.strerror}") from error

    def write(self, record: StepRecord) -> None:
        """Append a record; ignored after `close`."""
        if self._is_over:
            return
        # Not `asdict`, which copies every value.
        values = {name: getattr(record, name) for name in FIELDS}
        line = json.dumps(values, separators=(",", ":")) + "\n"
        try:
            if self._file is None:
                # A line is written at once: one system call a step, and a crash loses nothing.
                self._file = self._path.open("a", buffering=1, encoding="utf-8")
            self._file.write(line)
        except OSError as error:
            logger.error("event=trace_ended reason=%r", error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file; twice is once."""
        self._is_over = True
        file, self._file = self._file, None
        if file is not None:
            # What could not be written was told already.
            with suppress(OSError):
                file.close()


def read_trace(path: Path) -> list[StepRecord]:
    """The records of a file, in the order of their steps. Raises `ConfigError` naming the line."""
    try:
        with path.open(encoding="utf-8") as file:
            records = list(_records(path, file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError("trace", f"cannot read {path}: {reason}") from error
    return sorted(records, key=lambda record: record.step)


def _records(path: Path, lines: TextIO) -> Iterator[StepRecord]:
    for number, line in enumerate(lines, start=1):
        # The last line of a server that is writing, or was killed, may not be whole.
        if not line.endswith("\n"):
            return
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict) or values.keys() != set(FIELDS):
            raise ConfigError("trace", f"{path}, line {number}: not a step of --trace-steps")
        values["stages"] = tuple((begin, end) for begin, end in values["stages"])
        values["drafters"] = tuple(values["drafters"])
        yield StepRecord(**values)
