"""Scores documents by how likely the target itself would write them (SPECTRA-RETRIEVAL).

See docs/retrieval.md, "What to keep".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ...core.arrays import Float32, Float64, Int32, UInt8
from ...core.errors import ConfigError
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
    """The target's score of a document.

    log_prob     sum of the log-probabilities, nats, of its scored tokens
    num_tokens   number of these
    token_probs  probability of each of its tokens, as `encode_probs` writes it; 0 of those that are
                 not scored; None: not known
    """

    log_prob: float
    num_tokens: int
    token_probs: bytes | None = None

    @property
    def perplexity(self) -> float:
        """exp(-log_prob / num_tokens); inf where nothing was scored."""
        # A NaN score (overflow in half precision) must not rank as good.
        if self.num_tokens <= 0 or not math.isfinite(self.log_prob):
            return math.inf
        return math.exp(min(-self.log_prob / self.num_tokens, 700.0))


class TokenWindow(NamedTuple):
    """Tokens `start` to `stop` of a document; those from `first` on are scored."""

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

    def pieces(self, num_tokens: int) -> Iterator[TokenWindow]:
        """The windows of a document; every token that has one before it is scored in one of them.

        BOS counts as a token before the document's first.
        """
        yield TokenWindow(0, min(self.size, num_tokens), 1 - self.num_bos)
        start = self.size - self.overlap
        while start + self.overlap < num_tokens:
            yield TokenWindow(start, min(start + self.size, num_tokens), start + self.overlap)
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

    Windows without a scored token, as in a long question, are skipped.
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
    sums, counts = np.zeros(len(documents)), np.zeros(len(documents), dtype=np.int64)
    codes = [np.zeros(len(document.ids), dtype=np.uint8) for document in documents]
    for (index, piece), log_probs in zip(pieces, scorer.log_probs(texts), strict=True):
        places = documents[index].scored_places(piece.first, piece.stop)
        # The scored part of a window ends where its log-probabilities end.
        scored = log_probs[places - piece.stop].astype(np.float64)
        sums[index] += scored.sum()
        counts[index] += len(scored)
        codes[index][places] = encode_probs(scored)
    return [
        Score(float(total), int(count), probs.tobytes())
        for total, count, probs in zip(sums, counts, codes, strict=True)
    ]


# One byte a token, since a corpus has billions; in sums an error of 0.004 does no harm.
LEVELS = 255


def encode_probs(log_probs: Float64) -> UInt8:
    """Log-probabilities, nats, float64 [n] -> uint8 [n]: the square root of each probability, in
    255ths.

    Evenly spaced levels would merge all probabilities below 0.002. NaN becomes 0.
    """
    roots = np.exp(0.5 * np.minimum(np.nan_to_num(log_probs, nan=-np.inf), 0.0))
    return np.rint(LEVELS * roots).astype(np.uint8)


def decode_probs(codes: bytes) -> Float64:
    """Probabilities, float64 [n], of the bytes of `encode_probs`; each within 0.004."""
    roots = np.frombuffer(codes, dtype=np.uint8).astype(np.float64) / LEVELS
    return roots * roots
