"""Scores a corpus in large batches; a journal saves scoring a document twice.

The journal has after a header one line a score: its key, the sum of log-probabilities, the number
of scored tokens, and the bytes of its tokens' probabilities in base64 (4/3 bytes a token).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NamedTuple, Self

from ...core.errors import ConfigError
from .documents import TokenizedDocument
from .refine import Score, Scorer, Windows, score_documents

FIELD = "journal"
HEADER = b"draftline scores 2\n"
# Journals with this older header have no probabilities.
OLD_HEADER = b"draftline scores 1\n"
# Seconds of work that a power cut may lose; a killed process loses nothing that was added.
SYNC_SECONDS = 5.0
logger = logging.getLogger(__name__)
# Tokens of one call: enough for the target's largest steps, few enough for a smooth progress bar. A
# killed build loses only seconds.
BATCH_TOKENS = 16_384


class _Entry(NamedTuple):
    """One line: its numbers, and begin and end of its probabilities in the file; None: none."""

    score: Score
    probs: tuple[int, int] | None


class ScoreJournal:
    """An append-only file with one score a line; a context manager.

    Memory holds the numbers of each line, but not its probabilities. A partial last line is cut
    off. One build at a time writes the file. Raises `ConfigError` if the file cannot be written,
    has another format, or is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        try:
            self._entries = _read(self._file, path)
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_scores(self) -> int:
        """Number of scores, each key counted once."""
        return len(self._entries)

    def score(self, key: str) -> Score | None:
        """The score of a `score_key`, without `token_probs`; None: not scored yet."""
        entry = self._entries.get(key)
        return None if entry is None else entry.score

    def token_probs(self, key: str, num_tokens: int) -> bytes | None:
        """`Score.token_probs` of a score that is here, read from the file; None: it has none.

        Raises `ConfigError` unless they are of `num_tokens` tokens.
        """
        span = self._entries[key].probs
        if span is None:
            return None
        start, stop = span
        text = os.pread(self._file.fileno(), stop - start, start)
        try:
            probs = b64decode(text, validate=True)
        except ValueError as error:
            raise _corrupt(self.path, str(error)) from error
        if len(probs) != num_tokens:
            raise _corrupt(self.path, f"{len(probs)} probabilities of {num_tokens} tokens")
        return probs

    def add(self, scores: Mapping[str, Score]) -> None:
        """Append scores: they survive a crash of this process at once, and of the machine seconds
        later.

        Raises `ConfigError` if the file cannot be written.
        """
        end = self._file.seek(0, os.SEEK_END)
        lines: list[bytes] = []
        for key, score in scores.items():
            lines.append(_line(key, score))
            end += len(lines[-1])
            self._entries[key] = _entry(lines[-1], end)[1]
        self._write(b"".join(lines))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Write the file out and release its lock."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                # On a full disk, only a part may be written.
                data = data[self._file.write(data) :]
        except OSError as error:
            raise ConfigError(FIELD, f"cannot write {self.path}: {error}") from error


def _open_locked(path: Path) -> FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: written data is in the page cache and survives a killed process.
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise ConfigError(FIELD, f"cannot write {path}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(FIELD, f"another build writes {path}; wait, or name another") from error
    return file


def _read(file: FileIO, path: Path) -> dict[str, _Entry]:
    """The entries of the file, after a missing header is written and a partial line is cut off."""
    file.seek(0)
    head = file.read(len(HEADER))
    if not any(header.startswith(head) for header in (HEADER, OLD_HEADER)):
        raise ConfigError(FIELD, f"{path} is no journal of scores; name another file")
    if len(head) < len(HEADER):
        file.truncate(0)
        file.write(HEADER)
        return {}
    try:
        entries = dict(_entries(file))
    except ValueError as error:
        raise _corrupt(path, str(error)) from error
    if head == OLD_HEADER:
        # From here on, added lines have a form that earlier versions cannot read.
        with path.open("r+b", buffering=0) as begin:
            begin.write(HEADER)
    return entries


def _entries(file: FileIO) -> Iterator[tuple[str, _Entry]]:
    """The lines after the header; the last line of a key counts, and a partial line is cut off."""
    end = file.seek(len(HEADER))
    lines = BufferedReader(file)
    for line in lines:
        if not line.endswith(b"\n"):
            break
        end += len(line)
        yield _entry(line, end)
    lines.detach()
    file.truncate(end)


def _line(key: str, score: Score) -> bytes:
    numbers = f"{key} {score.log_prob!r} {score.num_tokens}".encode()
    probs = b"" if score.token_probs is None else b" " + b64encode(score.token_probs)
    return numbers + probs + b"\n"


def _entry(line: bytes, end: int) -> tuple[str, _Entry]:
    """The key and the entry of a line that ends at `end`. Raises `ValueError`."""
    key, log_prob, count, *probs = line.rstrip(b"\n").split(b" ")
    if len(probs) > 1:
        raise ValueError(f"{3 + len(probs)} fields in a line")
    span = (end - 1 - len(probs[0]), end - 1) if probs else None
    return key.decode("ascii"), _Entry(Score(float(log_prob), int(count)), span)


def _corrupt(path: Path, why: str) -> ConfigError:
    return ConfigError(FIELD, f"{path} is corrupt ({why}); delete it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusScorer:
    """Scores documents by the target, in large batches.

    model_hash  of the target, see `models/text/fingerprint.py`
    journal     None: scores are not kept
    """

    scorer: Scorer
    windows: Windows
    model_hash: str
    journal: ScoreJournal | None = None

    def scores(
        self,
        documents: Sequence[TokenizedDocument],
        advance: Callable[[int], None],
        *,
        with_probs: bool = False,
    ) -> list[Score]:
        """The score of each document, in order; calls `advance` with tokens that are done.

        with_probs  with `token_probs`, a byte a token; documents without them in the journal are
                    scored again, with a warning
        """
        keys = [score_key(document, self.windows, self.model_hash) for document in documents]
        known = self._known(documents, keys, with_probs)
        missing = [index for index, key in enumerate(keys) if key not in known]
        advance(_size(documents, range(len(documents))) - _size(documents, missing))
        for batch in batches(documents, missing):
            scores = self._batch(documents, batch)
            by_key = {keys[index]: score for index, score in zip(batch, scores, strict=True)}
            if self.journal is not None:
                self.journal.add(by_key)
            known |= {
                key: score if with_probs else score._replace(token_probs=None)
                for key, score in by_key.items()
            }
            advance(_size(documents, batch))
        return [known[key] for key in keys]

    def _known(
        self, documents: Sequence[TokenizedDocument], keys: Sequence[str], with_probs: bool
    ) -> dict[str, Score]:
        """The journal's scores, by key; with `with_probs` only those that have `token_probs`."""
        if self.journal is None:
            return {}
        known = {key: score for key in keys if (score := self.journal.score(key)) is not None}
        if not with_probs:
            return known
        whole: dict[str, Score] = {}
        for document, key in zip(documents, keys, strict=True):
            probs = self.journal.token_probs(key, len(document.ids)) if key in known else None
            if probs is not None:
                whole[key] = known[key]._replace(token_probs=probs)
        if len(whole) < len(known):
            logger.warning(
                "event=scored_again documents=%d journal=%s; of these it has perplexities, but no "
                "probabilities of tokens, which token_coverage needs",
                len(known) - len(whole),
                self.journal.path,
            )
        return whole

    def _batch(self, documents: Sequence[TokenizedDocument], indices: Sequence[int]) -> list[Score]:
        return score_documents([documents[index] for index in indices], self.scorer, self.windows)


def batches(documents: Sequence[TokenizedDocument], indices: Sequence[int]) -> Iterator[list[int]]:
    """`indices` in groups of about `BATCH_TOKENS` tokens; documents of like length share one.

    The longest come first, so that a batch that does not fit the memory fails at once.
    """
    batch: list[int] = []
    size = 0
    for index in sorted(indices, key=lambda index: -len(documents[index].ids)):
        batch.append(index)
        size += len(documents[index].ids)
        if size >= BATCH_TOKENS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(documents: Sequence[TokenizedDocument], indices: Sequence[int]) -> int:
    return sum(len(documents[index].ids) for index in indices)


def score_key(document: TokenizedDocument, windows: Windows, model_hash: str) -> str:
    """32 hex digits that are equal where a model gives the same score."""
    cut = f"{model_hash} {windows.window} {windows.overlap} {windows.bos_id} {len(document.ids)} "
    digest = hashlib.sha256(cut.encode())
    digest.update(document.ids.tobytes())
    if document.is_scored is not None:
        digest.update(document.is_scored.tobytes())
    return digest.hexdigest()[:32]
