"""The file of `--trace-steps`: one JSON line a step, and beside it the part that came before.

When the file holds half of what the trace may take, it is renamed to FILE.1, over the one that was
there, and a new one is begun: the newest steps are always kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from ...core.errors import ConfigError
from ...core.step.trace import SliceCounts, StepRecord

logger = logging.getLogger(__name__)

FIELDS = tuple(field.name for field in fields(StepRecord))


class TraceFile:
    """Writes records as they come; each line is in the file when `write` returns.

    Both parts together take at most `max_bytes`. Raises `ConfigError` if the file cannot be
    written. What the parts held before is lost. A disk that fills up later ends the trace and
    nothing else.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_part_bytes = max_bytes // 2
        self._part_bytes = 0
        self._file: TextIO | None = None
        self._is_over = False
        try:
            # Opened for good with the first record: an engine that does not start closes nothing.
            path.write_text("")
            # A part of an earlier run would be read with this one's.
            older_part(path).unlink(missing_ok=True)
        except OSError as error:
            where, reason = error.filename, error.strerror
            raise ConfigError("trace_steps", f"cannot write {where}: {reason}") from error

    def write(self, record: StepRecord) -> None:
        """Append a record; ignored after `close`."""
        if self._is_over:
            return
        # `asdict` would copy every value.
        values = {name: getattr(record, name) for name in FIELDS}
        line = json.dumps(values, separators=(",", ":")) + "\n"
        try:
            # JSON escapes what is not ASCII: a character is a byte.
            self._part_for(len(line)).write(line)
        except OSError as error:
            logger.error("event=trace_ended reason=%r", error.strerror)
            self.close()

    def _part_for(self, num_bytes: int) -> TextIO:
        """The file, with room for so many bytes more."""
        if self._file is not None and self._part_bytes + num_bytes > self._max_part_bytes:
            self._file.close()
            self._file = None
            self._path.replace(older_part(self._path))
            self._part_bytes = 0
        if self._file is None:
            # A line is written at once: one system call a step, and a crash loses nothing.
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        self._part_bytes += num_bytes
        return self._file

    def close(self) -> None:
        """Close the file; twice is once."""
        self._is_over = True
        file, self._file = self._file, None
        if file is not None:
            # What could not be written was told already.
            with suppress(OSError):
                file.close()


def older_part(path: Path) -> Path:
    """Path of the part with the steps before those of the file, once it was full."""
    return path.with_name(f"{path.name}.1")


def read_trace(path: Path) -> list[StepRecord]:
    """The records of a file and of its older part, if there is one, in the order of their steps.

    Raises `ConfigError` naming the line.
    """
    records = _read_part(path)
    older = older_part(path)
    if older.exists():
        records += _read_part(older)
    # A server that is writing may have renamed what was just read: the same steps come twice.
    by_step = {record.step: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _read_part(path: Path) -> list[StepRecord]:
    try:
        with path.open(encoding="utf-8") as file:
            return list(_records(path, file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError("trace", f"cannot read {path}: {reason}") from error


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
        values["slices"] = tuple(SliceCounts(*counts) for counts in values["slices"])
        yield StepRecord(**values)
