"""A record of each request that ends, in a file or a Redis stream, written off the engine's thread.

A record has a request's tenant and counts, and no text. A record that cannot be written is counted
and dropped.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from ...core.errors import ConfigError, StoreError
from ...core.fair_share import RequestUsage
from ...retrieval_store.redis_store.client import connect, reported, shown_url
from ..settings.settings import REDIS_SCHEMES

logger = logging.getLogger(__name__)

# Records that may wait while the file or Redis is slow.
MAX_WAITING = 10_000
# Records written at once.
MAX_BATCH = 500
STREAM = "draftline:usage"
# Redis forgets older ones.
MAX_STREAM_LEN = 1_000_000
TIMEOUT_S = 2.0
LOG_PERIOD_S = 60.0
MODE = 0o600


class UsageLog:
    """Writes records in a thread of its own; `note` may be called from any thread.

    where  path of a file, or a redis:// URL
    model  the served model's name
    """

    def __init__(self, where: str, model: str) -> None:
        """Raises `ConfigError` for a file that cannot be written."""
        self._model = model
        is_redis = where.startswith(REDIS_SCHEMES)
        self._target: _Stream | _File = _Stream(where) if is_redis else _File(where)
        self._waiting: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._complained_at = -LOG_PERIOD_S
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    def note(self, usage: RequestUsage) -> None:
        """Queue a record."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "model": self._model, **asdict(usage)}
        record["queue_s"] = round(usage.queue_s, 4)
        try:
            self._waiting.put_nowait(json.dumps(record))
        except queue.Full:
            self._drop(1, "too many records wait")

    def close(self) -> None:
        """Write the waiting records, for a few seconds at most."""
        try:
            self._waiting.put(None, timeout=TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines, line = [], self._waiting.get()
            while line is not None:
                lines.append(line)
                if len(lines) >= MAX_BATCH or self._waiting.empty():
                    break
                line = self._waiting.get()
            is_open = line is not None
            if lines:
                try:
                    self._target.write(lines)
                except (OSError, StoreError) as error:
                    self._drop(len(lines), str(error))

    def _drop(self, count: int, reason: str) -> None:
        with self._lock:
            self.num_dropped += count
            now = time.monotonic()
            if now - self._complained_at < LOG_PERIOD_S:
                return
            self._complained_at = now
        logger.error("event=usage_records_dropped total=%d reason=%r", self.num_dropped, reason)


class _File:
    """Lines at the end of a file, which may be moved away at any time (logrotate)."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            os.close(self._open())
        except OSError as error:
            raise ConfigError(
                "server.usage_log", f"cannot write {path}: {error.strerror}"
            ) from error

    def write(self, lines: Sequence[str]) -> None:
        """Append whole lines: one write, so that several processes may share the file."""
        data = "".join(f"{line}\n" for line in lines).encode()
        descriptor = self._open()
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError("only a part was written: the disk is full")
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE)


class _Stream:
    """Entries of a Redis stream."""

    def __init__(self, url: str) -> None:
        self._client = connect(url, TIMEOUT_S)
        self._where = shown_url(url)

    def write(self, lines: Sequence[str]) -> None:
        """Append entries, each with the record as JSON."""
        with reported(self._where), self._client.pipeline(transaction=False) as pipe:
            for line in lines:
                pipe.xadd(STREAM, {"record": line}, maxlen=MAX_STREAM_LEN, approximate=True)
            pipe.execute()
