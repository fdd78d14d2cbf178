"""Scores on disk, so that a corpus whose build was killed is not scored again."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Self

from ...core.errors import ConfigError
from .documents import TokenizedDocument
from .refine import Score, Windows

FIELD = "journal"
HEADER = b"draftline scores 1\n"
# What a power cut may cost; a killed process loses nothing that was added.
SYNC_SECONDS = 5.0


def score_key(document: TokenizedDocument, windows: Windows, model_hash: str) -> str:
    """32 hex digits that are equal where a model gives the same score."""
    cut = f"{model_hash} {windows.window} {windows.overlap} {windows.bos_id} {len(document.ids)} "
    digest = hashlib.sha256(cut.encode())
    digest.update(document.ids.tobytes())
    if document.is_scored is not None:
        digest.update(document.is_scored.tobytes())
    return digest.hexdigest()[:32]


class ScoreJournal:
    """A file of one line a score, which only grows; a context manager.

    A last line that was torn when its writer died is cut off. One build at a time writes it.
    Raises `ConfigError` if the file cannot be written, is another's, or is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        self._scores = _read(self._file, path)
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def scores(self) -> Mapping[str, Score]:
        """Every score, by `score_key`."""
        return self._scores

    def add(self, scores: Mapping[str, Score]) -> None:
        """Keep more scores: they outlive this process at once, and the machine seconds later."""
        self._scores.update(scores)
        lines = (f"{key} {each.log_prob!r} {each.num_tokens}\n" for key, each in scores.items())
        self._file.write("".join(lines).encode())
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Write the file out and release its lock."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _open_locked(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what is written is the system's, and a killed process cannot take it along.
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise ConfigError(FIELD, f"cannot write {path}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(FIELD, f"another build writes {path}; wait, or name another") from error
    return file


def _read(file: BinaryIO, path: Path) -> dict[str, Score]:
    file.seek(0)
    content = file.read()
    if not HEADER.startswith(content[: len(HEADER)]):
        file.close()
        raise ConfigError(FIELD, f"{path} is no journal of scores; name another file")
    whole = content[: content.rfind(b"\n") + 1]
    file.truncate(len(whole))
    if not whole:
        file.write(HEADER)
        return {}
    try:
        return dict(map(_parse, whole[len(HEADER) :].splitlines()))
    except ValueError as error:
        file.close()
        raise ConfigError(FIELD, f"{path} is corrupt ({error}); delete it") from error


def _parse(line: bytes) -> tuple[str, Score]:
    key, log_prob, count = line.decode("ascii").split(" ")
    return key, Score(float(log_prob), int(count))
