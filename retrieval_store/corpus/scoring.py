"""Scores a corpus in large batches; what a journal holds is not scored again."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from ...core.errors import ConfigError
from .documents import TokenizedDocument
from .refine import Score, Scorer, Windows, score_documents

# Tokens of one call: enough for the target's largest steps, few enough for a bar that moves and
# for a killed build to lose seconds.
BATCH_TOKENS = 16_384
FIELD = "journal"
HEADER = b"draftline scores 1\n"
# What a power cut may cost; a killed process loses nothing that was added.
SYNC_SECONDS = 5.0


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
        self, documents: Sequence[TokenizedDocument], advance: Callable[[int], None]
    ) -> list[Score]:
        """The score of each document, in order; calls `advance` with tokens that are done."""
        keys = [score_key(document, self.windows, self.model_hash) for document in documents]
        known = {} if self.journal is None else dict(self.journal.scores)
        missing = [index for index, key in enumerate(keys) if key not in known]
        advance(_size(documents, range(len(documents))) - _size(documents, missing))
        for batch in batches(documents, missing):
            scores = self._batch(documents, batch)
            by_key = {keys[index]: score for index, score in zip(batch, scores, strict=True)}
            if self.journal is not None:
                self.journal.add(by_key)
            known |= by_key
            advance(_size(documents, batch))
        return [known[key] for key in keys]

    def _batch(self, documents: Sequence[TokenizedDocument], indices: Sequence[int]) -> list[Score]:
        return score_documents([documents[index] for index in indices], self.scorer, self.windows)


def batches(documents: Sequence[TokenizedDocument], indices: Sequence[int]) -> Iterator[list[int]]:
    """`indices` in groups of about `BATCH_TOKENS` tokens; documents of like length share one.

    The longest come first: what does not fit the memory fails at once.
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
