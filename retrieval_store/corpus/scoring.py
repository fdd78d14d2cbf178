"""Scores a corpus in large batches; scores in a journal are reused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .documents import TokenizedDocument
from .refine import Score, Scorer, Windows, score_documents
from .score_journal import ScoreJournal

logger = logging.getLogger(__name__)

# Tokens of one call: enough for the target's largest steps, few enough for a smooth progress bar. A
# killed build loses only seconds.
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
