"""The file of `--trace-steps`: Chrome trace events, for ui.perfetto.dev and chrome://tracing.

Beside it stands the part that came before: when the file holds half of what the trace may take, it
is renamed to FILE.1, over the one that was there, and a new one is begun. So the newest steps are
always kept.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.step.trace import TraceEvent

logger = logging.getLogger(__name__)

# Of both parts together, about 250,000 steps.
MAX_TRACE_BYTES = 256_000_000
BETWEEN = b",\n"
# Of a part that is full or closed; viewers do without that of one whose process was killed.
END = b"\n]\n"


class TraceFile:
    """Writes the events of one engine as they come; implements `TraceSink`.

    They are in the file when `write` returns. Both parts together take at most `max_bytes`. Raises
    `ConfigError` if the file cannot be written. What the parts held before is lost. A disk that
    fills up later ends the trace and nothing else.

    engine  its name
    """

    def __init__(self, path: Path, max_bytes: int, engine: str) -> None:
        self._path = path
        self._max_part_bytes = max_bytes // 2
        self._pid = os.getpid()
        # The first lines of every part: of the engine, and of each row, whose number is its place.
        self._names = [self._named("process_name", engine)]
        self._num_named = self._num_bytes = 0
        self._file: FileIO | None = None
        self._is_over = False
        try:
            # Opened for good with the first events: an engine that does not start closes nothing.
            path.write_bytes(b"[]\n")
            # A part of an earlier run would be taken for one of this run.
            older_part(path).unlink(missing_ok=True)
        except OSError as error:
            where, reason = error.filename, error.strerror
            raise ConfigError("trace_steps", f"cannot write {where}: {reason}") from error

    def row(self, name: str) -> int:
        """See `TraceSink`."""
        row = len(self._names)
        self._names.append(self._named("thread_name", name, tid=row))
        return row

    def write(self, events: Sequence[TraceEvent]) -> None:
        """See `TraceSink`; ignored after `close`."""
        if self._is_over:
            return
        lines = [self._complete(event) for event in events]
        num_bytes = len(END) + sum(len(BETWEEN) + len(line) for line in lines)
        try:
            file = self._file
            if file is None or self._num_bytes + num_bytes > self._max_part_bytes:
                file = self._next_part()
            # Rows may have come since the part was begun.
            named = self._names[self._num_named :]
            self._put(file, b"".join(BETWEEN + line for line in (*named, *lines)))
            self._num_named = len(self._names)
        except OSError as error:
            logger.error("event=trace_ended reason=%r", error.strerror)
            self.close()

    def _next_part(self) -> FileIO:
        if self._file is not None:
            self._end_part()
            self._path.replace(older_part(self._path))
        self._file = file = FileIO(self._path, "w")
        self._num_named, self._num_bytes = 1, 0
        self._put(file, b"[\n" + self._names[0])
        return file

    def _end_part(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.write(END)

    def _put(self, file: FileIO, content: bytes) -> None:
        """One system call: a process that is killed has written all of it or nothing."""
        if file.write(content) < len(content):
            file.seek(self._num_bytes)
            file.truncate()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._num_bytes += len(content)

    def close(self) -> None:
        """Close the file; twice is once."""
        self._is_over = True
        # A failed write was logged already.
        with suppress(OSError):
            self._end_part()

    def _complete(self, event: TraceEvent) -> bytes:
        begin, end = round(1e6 * event.begin), round(1e6 * event.end)
        return _line(
            {
                "name": event.name, "ph": "X", "ts": begin, "dur": end - begin,
                "pid": self._pid, "tid": event.row, "args": event.args,
            }
        )  # fmt: skip

    def _named(self, kind: str, name: str, **thread: int) -> bytes:
        return _line({"name": kind, "ph": "M", "pid": self._pid, **thread, "args": {"name": name}})


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode("ascii")


def older_part(path: Path) -> Path:
    """Path of the part with the events before those of the file, once it was full."""
    return path.with_name(f"{path.name}.1")
