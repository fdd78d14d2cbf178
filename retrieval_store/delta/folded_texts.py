"""Learned texts in segments, and out of them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...core.arrays import Int32
from ..segment.segment import SEPARATOR, Segment, build_segment
from ..store import SegmentStore
from .delta_log import DeltaEvent, Folded, text_digest
from .fingerprint import Fingerprint
from .settings import LearningSettings
from .weighted_texts import WeightedTexts


def learned_segment(documents: Sequence[Int32], fingerprint: Fingerprint) -> Segment:
    """A segment of learned texts. Raises `ConfigError` for ids outside the vocabulary."""
    return build_segment(
        documents,
        tokenizer_hash=fingerprint.tokenizer_hash,
        model_hash=fingerprint.model_hash,
        vocab_size=fingerprint.vocab_size,
    )


def segment_documents(segment: Segment) -> Iterator[Int32]:
    """int32 [n] each: the documents that the segment was built of, in order."""
    text = segment.text.astype(np.uint32)
    start = 0
    for end in np.flatnonzero(text == SEPARATOR).tolist():
        yield text[start:end].astype(np.int32)
        start = end + 1


def folded_texts(
    store: SegmentStore, namespace: str, folded: Folded, settings: LearningSettings, now: float
) -> WeightedTexts:
    """The texts of the last fold with their weights; none if its segment is not listed any more.

    Then it was replaced by `corpus build`, or joined with others. Raises `DamagedError` if it
    cannot be read any more, and `StoreError`. No text is newer than `now`.
    """
    texts = WeightedTexts(settings.folded_tokens, settings.half_life)
    if folded.segment_id in store.manifest().segment_ids(namespace):
        assert folded.segment_id is not None
        documents = segment_documents(store.get(namespace, folded.segment_id))
        # Copies of a text have one digest.
        for digest, tokens in {text_digest(tokens): tokens for tokens in documents}.items():
            event = DeltaEvent(digest, folded.weights.get(digest, 1.0), tokens)
            texts.apply(event, min(folded.time, now))
    return texts
