"""Makes one segment of several, and reads back the documents of a segment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arrays import Int32
from ...core.errors import ConfigError
from ..segment.segment import SEPARATOR, Segment, build_segment
from ..store import SegmentStore


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """The result of `compact`: the removed ids, the id that replaces them, and the copies dropped.

    An empty `removed` means that there was nothing to do.
    """

    segment_id: str
    removed: tuple[str, ...]
    num_duplicates: int


def documents_of(segment: Segment) -> Iterator[Int32]:
    """The documents of a segment, int32 [n] each, in the order in which they were stored."""
    ends = np.flatnonzero(segment.text == SEPARATOR)
    start = 0
    for end in ends:
        yield segment.text[start:end].astype(np.int32)
        start = int(end) + 1


def merge_segments(segments: Sequence[Segment]) -> tuple[Segment, int]:
    """One segment of the documents of several, and the number of copies that were left out.

    Documents keep their order; of equal ones the first stays. Raises `ConfigError` if the segments
    were built for different tokenizers, models or vocabularies.
    """
    fits = {
        (segment.header.tokenizer_hash, segment.header.model_hash, segment.header.vocab_size)
        for segment in segments
    }
    if len(fits) != 1:
        raise ConfigError(
            "segments",
            f"are for {len(fits)} different models; remove those that are not served, then compact",
        )
    tokenizer_hash, model_hash, vocab_size = fits.pop()
    seen: set[bytes] = set()
    kept, num_read = [], 0
    for segment in segments:
        for document in documents_of(segment):
            num_read += 1
            digest = hashlib.sha256(document.tobytes()).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append(document)
    merged = build_segment(
        kept, tokenizer_hash=tokenizer_hash, model_hash=model_hash, vocab_size=vocab_size
    )
    return merged, num_read - len(kept)


def compact(store: SegmentStore, namespace: str) -> CompactionReport:
    """Replace the segments of a namespace by one that holds all their documents once.

    Readers see the old segments, briefly both, then the new one. A crash loses nothing: the next
    compaction drops duplicates. Raises `ConfigError` for an empty namespace or segments of
    different models. Raises `StoreError` for a corrupt segment, and if the store loses its data
    meanwhile.
    """
    manifest = store.manifest()
    old = manifest.segment_ids(namespace)
    if not old:
        raise ConfigError("namespace", f"{namespace} has no segments; see corpus list")
    if len(old) == 1:
        return CompactionReport(old[0], (), 0)
    merged, num_duplicates = merge_segments([store.get(namespace, name) for name in old])
    (segment_id,) = store.change(namespace, add=[merged], follows=manifest)
    removed = tuple(name for name in old if name != segment_id)
    for name in removed:
        store.delete(namespace, name)
    return CompactionReport(segment_id, removed, num_duplicates)
