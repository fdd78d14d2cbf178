"""Keeps the documents that the target itself would most likely write (SPECTRA-RETRIEVAL).

See docs/algorithms/retrieval_store.md, "Perplexity refinement".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from ...core.arrays import Float32, Int32
from ...core.errors import ConfigError
from .coverage import by_coverage
from .documents import TokenizedDocument


class Scorer(Protocol):
    """The target as a source of log-probabilities of texts."""

    def log_probs(self, documents: Sequence[Int32]) -> list[Float32]:
        """Log-probability, nats, of every token but the first of each document, in order.

        documents: int32 [n], n from 1 to the model's context; each gives float32 [n - 1]. A token
        is given all before it; nothing is added.
        """
        ...


class Score(NamedTuple):
    """Sum of log-probabilities, nats, of a document's scored tokens, and their number."""

    log_prob: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(-log_prob / num_tokens); inf where nothing was scored."""
        # A score that is not a number (overflow in half precision) must not count as good.
        if self.num_tokens <= 0 or not math.isfinite(self.log_prob):
            return math.inf
        return math.exp(min(-self.log_prob / self.num_tokens, 700.0))


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a document, of which those from `first` on are scored."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows that documents are cut into for a model of limited context.

    window   tokens the scorer takes at once, BOS included
    overlap  tokens at the start of a later window that are context only
    bos_id   put before every window, so that a document's first token is scored too; None for
             models without one
    """

    window: int
    overlap: int
    bos_id: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.overlap < self.size:
            raise ConfigError("overlap", f"must be from 1 to {self.size - 1}, got {self.overlap}")

    @property
    def num_bos(self) -> int:
        """Tokens that are put before a window."""
        return int(self.bos_id is not None)

    @property
    def size(self) -> int:
        """Document tokens in a window."""
        return self.window - self.num_bos

    def pieces(self, num_tokens: int) -> Iterator[Piece]:
        """The windows of a document; every token that has one before it is scored in one of them.

        BOS counts as a token before the document's first.
        """
        yield Piece(0, min(self.size, num_tokens), 1 - self.num_bos)
        start = self.size - self.overlap
        while start + self.overlap < num_tokens:
            yield Piece(start, min(start + self.size, num_tokens), start + self.overlap)
            start += self.size - self.overlap

    def with_bos(self, tokens: Int32) -> Int32:
        """A window's tokens as the scorer takes them: with BOS where the model has one."""
        if self.bos_id is None:
            return tokens
        return np.concatenate(([self.bos_id], tokens)).astype(np.int32)


def score_documents(
    documents: Sequence[TokenizedDocument], scorer: Scorer, windows: Windows
) -> list[Score]:
    """Score each document; sums and counts are added over its windows.

    Windows without a token that is scored, as in a long question, are passed over.
    """
    pieces = [
        (index, piece)
        for index, document in enumerate(documents)
        for piece in windows.pieces(len(document.ids))
        if document.num_scored(piece.first, piece.stop)
    ]
    texts = [
        windows.with_bos(documents[index].ids[piece.start : piece.stop]) for index, piece in pieces
    ]
    totals = [Score(0.0, 0) for _ in documents]
    for (index, piece), log_probs in zip(pieces, scorer.log_probs(texts), strict=True):
        scored = log_probs[len(log_probs) - (piece.stop - piece.first) :].astype(np.float64)
        mask = documents[index].is_scored
        if mask is not None:
            scored = scored[mask[piece.first : piece.stop]]
        total = totals[index]
        totals[index] = Score(total.log_prob + float(scored.sum()), total.num_tokens + len(scored))
    return totals


def choose_lowest(
    perplexities: Sequence[float], *, keep: int | None = None, max_perplexity: float | None = None
) -> list[int]:
    """Indices, ascending, of the `keep` lowest perplexities that are at most `max_perplexity`.

    Equal ones are taken in order; None is no limit; documents of infinite perplexity never stay.
    """
    likely = _likely(perplexities, max_perplexity)
    return sorted(sorted(likely, key=lambda index: (perplexities[index], index))[:keep])


def choose_covering(
    documents: Sequence[TokenizedDocument],
    perplexities: Sequence[float],
    *,
    keep: int,
    max_perplexity: float | None = None,
) -> list[int]:
    """Indices, ascending, of `keep` documents that together hold most of what the target would say:
    n-grams, each weighted by 1 over its document's perplexity.

    None above `max_perplexity`, and none of infinite perplexity.
    """
    likely = _likely(perplexities, max_perplexity)
    if not likely:
        return []
    order = by_coverage(
        [documents[index].ids for index in likely], [1 / perplexities[index] for index in likely]
    )
    return sorted(likely[place] for place in islice(order, keep))


def _likely(perplexities: Sequence[float], max_perplexity: float | None) -> list[int]:
    """Indices of the finite perplexities that are at most `max_perplexity`; None: no limit."""
    limit = math.inf if max_perplexity is None else max_perplexity
    return [index for index, one in enumerate(perplexities) if one <= limit and math.isfinite(one)]
