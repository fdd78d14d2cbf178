"""Builds a corpus: documents, refinement by the target, segments, store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import Int32
from ...core.errors import ConfigError
from ...core.progress import Progress, unseen
from ..delta.settings import Fingerprint
from ..segment.segment import Segment, build_segment
from ..store import SegmentStore, check_namespace
from .documents import Document, DocumentFilter, DocumentRules, TokenizedDocument, Unreadable
from .refine import Score
from .scoring import CorpusScorer
from .selection import LOWEST, TOKEN_COVERAGE, choose, resolve_selection

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Number of example documents that are named for each reason.
MAX_EXAMPLES = 5
Tokenize = Callable[[Document], TokenizedDocument]


@dataclass(slots=True)
class DropLog:
    """Counts documents that were dropped by reason, and remembers the first few names of each."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """Count one more document."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        names = self.examples.setdefault(reason, [])
        if len(names) < MAX_EXAMPLES:
            names.append(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """The outcome of `build_corpus`.

    num_read       documents read
    dropped        reason -> documents, perplexity included
    examples       reason -> names of the first of them
    num_kept       documents stored
    num_tokens     tokens stored
    segment_ids    of the segments put in the store
    num_bytes      of these segments together
    scored         perplexity of every document that was scored; inf where the target had none
    kept_scored    the same of the stored documents
    """

    num_read: int
    dropped: Mapping[str, int]
    examples: Mapping[str, Sequence[str]]
    num_kept: int
    num_tokens: int
    segment_ids: tuple[str, ...]
    num_bytes: int
    scored: tuple[float, ...] = ()
    kept_scored: tuple[float, ...] = ()

    @property
    def perplexities(self) -> dict[float, float]:
        """Quantile (0, 0.25, 0.5, 0.75, 1) -> perplexity; empty if nothing was scored."""
        return quantiles(self.scored)

    @property
    def kept_perplexities(self) -> dict[float, float]:
        """Quantile -> perplexity of the stored documents; empty if nothing was scored."""
        return quantiles(self.kept_scored)

    def fields(self) -> dict[str, Any]:
        """Counts, examples and quantiles by name, for JSON; not each perplexity."""
        return {
            "read": self.num_read,
            "kept": self.num_kept,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "segments": list(self.segment_ids),
            "dropped": {
                reason: {"documents": count, "examples": list(self.examples[reason])}
                for reason, count in self.dropped.items()
            },
            "scored": len(self.scored),
            "perplexity_quantiles": {str(q): value for q, value in self.perplexities.items()},
            "kept_perplexity_quantiles": {
                str(q): value for q, value in self.kept_perplexities.items()
            },
        }


def quantiles(values: Sequence[float]) -> dict[float, float]:
    """The quantiles of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {}
    return {
        q: float(value) for q, value in zip(QUANTILES, np.quantile(finite, QUANTILES), strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """Which documents stay: those that the target finds likely.

    keep            largest number of documents kept; None: all
    select          which, see `ranking`; None: see `resolve_selection`
    max_perplexity  none above; None: no limit

    Raises `ConfigError`.
    """

    scorer: CorpusScorer
    keep: int | None = None
    select: str | None = None
    max_perplexity: float | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError("keep", f"must be at least 1, got {self.keep}")
        resolve_selection(self.select, self.keep)
        if self.max_perplexity is not None and not self.max_perplexity >= 1:
            raise ConfigError("max_perplexity", f"must be at least 1, got {self.max_perplexity}")

    @property
    def selection(self) -> str:
        """Which documents stay, by name."""
        return resolve_selection(self.select, self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """How documents become segments.

    refinement          None keeps every document that passes the rules
    max_segment_tokens  a larger corpus makes several segments (25 bytes of memory a token)
    progress            called with the progress of each part of the work
    """

    fingerprint: Fingerprint
    rules: DocumentRules = field(default_factory=DocumentRules)
    refinement: Refinement | None = None
    max_segment_tokens: int = 64_000_000
    progress: Progress = unseen


def build_corpus(
    store: SegmentStore,
    namespace: str,
    documents: Iterable[Document | Unreadable],
    tokenize: Tokenize,
    settings: BuildSettings,
    *,
    remove: Sequence[str] = (),
) -> CorpusReport:
    """Filter and refine the documents, then add them to a namespace of `store`.

    The same change deletes the segments whose ids are in `remove`; others stay. Raises
    `ConfigError` if no document is left, and `StoreError` if the store cannot take the segments.
    """
    check_namespace(namespace)
    dropped = DropLog()
    num_read, fit = _fit(documents, tokenize, settings, dropped)
    scores = _scores(fit, settings)
    kept = _chosen(scores, [one.tokens for one in fit], settings.refinement)
    for index in sorted(set(range(len(fit))) - set(kept)):
        dropped.add(_reason(settings.refinement), fit[index].name)
    if not kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.counts.items())
        raise ConfigError("documents", f"none of {num_read} is left ({reasons or 'no input'})")
    segments = list(_segments([fit[index].tokens.ids for index in kept], settings))
    perplexities = [score.perplexity for score in scores]
    return CorpusReport(
        num_read=num_read,
        dropped=dropped.counts,
        examples=dropped.examples,
        num_kept=len(kept),
        num_tokens=sum(segment.header.num_tokens for segment in segments),
        segment_ids=tuple(store.change(namespace, add=segments, remove=remove)),
        num_bytes=sum(len(segment.data) for segment in segments),
        scored=tuple(perplexities),
        kept_scored=tuple(perplexities[index] for index in kept) if perplexities else (),
    )


class _Fit(NamedTuple):
    """A document that passed the rules."""

    name: str
    tokens: TokenizedDocument


def _fit(
    documents: Iterable[Document | Unreadable],
    tokenize: Tokenize,
    settings: BuildSettings,
    dropped: DropLog,
) -> tuple[int, list[_Fit]]:
    """The number of documents read, and the documents that pass the rules."""
    sieve = DocumentFilter(settings.rules)
    num_read = 0
    fit: list[_Fit] = []
    with settings.progress("reading", total=None, unit="documents") as work:
        for document in documents:
            num_read += 1
            work.advance()
            tokens = _tokens(document, tokenize, sieve)
            if isinstance(tokens, str):
                dropped.add(tokens, document.name)
            else:
                fit.append(_Fit(document.name, tokens))
    return num_read, fit


def _tokens(
    document: Document | Unreadable, tokenize: Tokenize, sieve: DocumentFilter
) -> TokenizedDocument | str:
    """The tokens of a document that passes the rules, or the reason why it does not."""
    if isinstance(document, Unreadable):
        return document.reason
    if (fault := sieve.text_fault(document.text)) is not None:
        return fault
    tokens = tokenize(document)
    return sieve.length_fault(len(tokens.ids)) or tokens


def _scores(fit: Sequence[_Fit], settings: BuildSettings) -> list[Score]:
    refinement = settings.refinement
    if refinement is None:
        return []
    tokens = [document.tokens for document in fit]
    num_tokens = sum(len(each.ids) for each in tokens)
    with settings.progress("scoring", total=num_tokens, unit="tokens") as work:
        return refinement.scorer.scores(
            tokens, work.advance, with_probs=refinement.selection == TOKEN_COVERAGE
        )


def _chosen(
    scores: Sequence[Score], documents: Sequence[TokenizedDocument], refinement: Refinement | None
) -> list[int]:
    if refinement is None:
        return list(range(len(documents)))
    keep, limit = refinement.keep, refinement.max_perplexity
    return choose(documents, scores, refinement.selection, keep=keep, max_perplexity=limit)


def _reason(refinement: Refinement | None) -> str:
    """Why a document that passed the rules is not kept."""
    is_lowest = refinement is None or refinement.selection == LOWEST
    return "perplexity" if is_lowest else "perplexity or coverage"


def _segments(documents: Sequence[Int32], settings: BuildSettings) -> Iterator[Segment]:
    fingerprint = settings.fingerprint
    with settings.progress("sorting", total=len(documents), unit="documents") as work:
        for group in _groups(documents, settings.max_segment_tokens):
            yield build_segment(
                group,
                tokenizer_hash=fingerprint.tokenizer_hash,
                model_hash=fingerprint.model_hash,
                vocab_size=fingerprint.vocab_size,
            )
            work.advance(len(group))


def _groups(documents: Sequence[Int32], most: int) -> Iterator[list[Int32]]:
    """Runs of documents with at most `most` tokens; a longer document is its own group."""
    group: list[Int32] = []
    size = 0
    for document in documents:
        if group and size + len(document) > most:
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document)
    if group:
        yield group
