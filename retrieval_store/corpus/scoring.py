"""Scores a corpus in large batches; what a journal holds is not scored again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .documents import TokenizedDocument
from .refine import Score, Scorer, Windows, score_documents
from .score_journal import ScoreJournal, score_key

# Tokens of one call: enough for the target's largest steps, few enough for a bar that moves and
# for a killed build to lose seconds.
BATCH_TOKENS = 16_384


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
