"""Keeps the documents that the target itself would most likely write (SPECTRA-RETRIEVAL)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..core.errors import ConfigError
from ..core.types import Int32


class Scorer(Protocol):
    """The target as a judge of texts."""

    def score(self, documents: Sequence[Int32]) -> list[tuple[float, int]]:
        """(sum of log-probabilities, nats; how many tokens it is over) of each document, in order.

        documents: int32 [n], n at most the model's context. Every token but the first is scored,
        given all before it; nothing is added. A document of one token gives (0.0, 0).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How documents are cut for a model of limited context.

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
    def size(self) -> int:
        """Document tokens in a window."""
        return self.window - (self.bos_id is not None)

    def pieces(self, document: Int32) -> Iterator[tuple[Int32, int]]:
        """(tokens for the scorer, sign): the signed sum over the pieces scores the document.

        Each window but the first is followed by its own overlap with sign -1. By the chain rule
        the difference is exactly the score of the tokens after the overlap.
        """
        yield self._with_bos(document[: self.size]), 1
        start = self.size - self.overlap
        while start + self.overlap < len(document):
            yield self._with_bos(document[start : start + self.size]), 1
            yield self._with_bos(document[start : start + self.overlap]), -1
            start += self.size - self.overlap

    def _with_bos(self, tokens: Int32) -> Int32:
        if self.bos_id is None:
            return tokens
        return np.concatenate(([self.bos_id], tokens)).astype(np.int32)


def perplexities(documents: Sequence[Int32], scorer: Scorer, windows: Windows) -> list[float]:
    """exp(-sum of log-probabilities / count) of each document; inf where nothing was scored.

    Sums and counts are added over a document's windows before the exponential.
    """
    pieces: list[Int32] = []
    owners: list[tuple[int, int]] = []
    for index, document in enumerate(documents):
        for piece, sign in windows.pieces(document):
            pieces.append(piece)
            owners.append((index, sign))
    totals = [[0.0, 0] for _ in documents]
    for (index, sign), (log_prob, count) in zip(owners, scorer.score(pieces), strict=True):
        totals[index][0] += sign * log_prob
        totals[index][1] += sign * count
    return [_perplexity(log_prob, count) for log_prob, count in totals]


def choose_lowest(
    found: Sequence[float], *, keep: int | None = None, max_perplexity: float | None = None
) -> list[int]:
    """Indices, ascending, of the `keep` lowest perplexities that are at most `max_perplexity`.

    Equal ones are taken in order; None is no limit; documents of infinite perplexity never stay.
    """
    limit = math.inf if max_perplexity is None else max_perplexity
    order = sorted(range(len(found)), key=lambda index: (found[index], index))
    good = [index for index in order if found[index] <= limit and math.isfinite(found[index])]
    return sorted(good[:keep])


def _perplexity(log_prob: float, count: int) -> float:
    # A score that is not a number (overflow in half precision) must not count as good.
    if count <= 0 or not math.isfinite(log_prob):
        return math.inf
    return math.exp(min(-log_prob / count, 700.0))
