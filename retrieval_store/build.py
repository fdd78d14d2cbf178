"""Builds a corpus: documents, refinement by the target, segments, store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.progress import Progress

from ..core.errors import ConfigError
from ..core.types import Int32
from .corpus_report import CorpusReport, quantiles
from .documents import Document, DocumentFilter, DocumentRules, Unreadable
from .fitness import Fitness
from .refine import Scorer, Windows, choose_lowest, perplexities
from .segment import Segment, build_segment
from .store import SegmentStore, check_namespace

Tokenize = Callable[[str], Int32]
# Documents scored by one call: enough to fill the target's batches, few enough for a live bar.
SCORED_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """Which documents stay: those that the target finds most likely.

    keep            at most so many, the lowest perplexities first; None: all
    max_perplexity  none above; None: no limit
    """

    scorer: Scorer
    windows: Windows
    keep: int | None = None
    max_perplexity: float | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError("keep", f"must be at least 1, got {self.keep}")
        if self.max_perplexity is not None and not self.max_perplexity >= 1:
            raise ConfigError("max_perplexity", f"must be at least 1, got {self.max_perplexity}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """How documents become segments.

    refinement          None keeps every fit document
    max_segment_tokens  a larger corpus makes several segments (25 bytes of memory a token)
    show_progress       a bar on stderr
    """

    fitness: Fitness
    rules: DocumentRules = field(default_factory=DocumentRules)
    refinement: Refinement | None = None
    max_segment_tokens: int = 64_000_000
    show_progress: bool = False


def build_corpus(
    store: SegmentStore,
    namespace: str,
    documents: Iterable[Document | Unreadable],
    tokenize: Tokenize,
    settings: BuildSettings,
    *,
    remove: Sequence[str] = (),
) -> CorpusReport:
    """Add the documents that are fit to a namespace of `store`.

    `documents` may be the iterator of `read_documents`. Segments whose ids are in `remove` go in
    the same change; whatever else was there stays. Raises `ConfigError` if none is left, and
    `StoreError` if the store cannot take the segments.
    """
    check_namespace(namespace)
    console = Console(stderr=True)
    with Progress(console=console, disable=not settings.show_progress) as progress:
        sieve = DocumentFilter(settings.rules)
        num_read, fit = _tokenized(documents, tokenize, sieve, progress)
        found = _scored(fit, settings.refinement, progress)
        kept = _chosen(found, len(fit), settings.refinement)
        if len(kept) < len(fit):
            sieve.dropped["perplexity"] = len(fit) - len(kept)
        if not kept:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in sieve.dropped.items())
            raise ConfigError("documents", f"none of {num_read} is left ({reasons or 'no input'})")
        segments = list(_segments([fit[index] for index in kept], settings, progress))
    return CorpusReport(
        num_read=num_read,
        dropped=dict(sieve.dropped),
        num_kept=len(kept),
        num_tokens=sum(segment.header.num_tokens for segment in segments),
        segment_ids=tuple(store.change(namespace, add=segments, remove=remove)),
        num_bytes=sum(len(segment.data) for segment in segments),
        perplexities=quantiles(found),
        kept_perplexities=quantiles([found[index] for index in kept] if found else []),
    )


def _tokenized(
    documents: Iterable[Document | Unreadable],
    tokenize: Tokenize,
    sieve: DocumentFilter,
    progress: Progress,
) -> tuple[int, list[Int32]]:
    task = progress.add_task("Reading", total=None)
    num_read = 0
    fit: list[Int32] = []
    for document in documents:
        num_read += 1
        progress.advance(task)
        if isinstance(document, Unreadable):
            sieve.dropped[document.reason] += 1
        elif sieve.accepts_text(document.text):
            tokens = np.asarray(tokenize(document.text), dtype=np.int32)
            if sieve.accepts_length(len(tokens)):
                fit.append(tokens)
    progress.update(task, total=num_read)
    return num_read, fit


def _scored(
    documents: Sequence[Int32], refinement: Refinement | None, progress: Progress
) -> list[float]:
    if refinement is None:
        return []
    task = progress.add_task("Scoring", total=len(documents))
    found: list[float] = []
    for start in range(0, len(documents), SCORED_AT_ONCE):
        batch = documents[start : start + SCORED_AT_ONCE]
        found += perplexities(batch, refinement.scorer, refinement.windows)
        progress.advance(task, len(batch))
    return found


def _chosen(found: Sequence[float], count: int, refinement: Refinement | None) -> list[int]:
    if refinement is None:
        return list(range(count))
    return choose_lowest(found, keep=refinement.keep, max_perplexity=refinement.max_perplexity)


def _segments(
    documents: Sequence[Int32], settings: BuildSettings, progress: Progress
) -> Iterator[Segment]:
    fitness = settings.fitness
    task = progress.add_task("Sorting", total=len(documents))
    for group in _groups(documents, settings.max_segment_tokens):
        yield build_segment(
            group,
            tokenizer_hash=fitness.tokenizer_hash,
            model_hash=fitness.model_hash,
            vocab_size=fitness.vocab_size,
        )
        progress.advance(task, len(group))


def _groups(documents: Sequence[Int32], most: int) -> Iterator[list[Int32]]:
    """Runs of documents of at most `most` tokens; a longer document makes a group of its own."""
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
