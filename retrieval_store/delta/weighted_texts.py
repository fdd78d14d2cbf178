"""Learned texts of one namespace, weighted by use and time, and as segments.

Formula: docs/retrieval.md, "Learning".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arrays import Int32
from ..segment.segment import SEPARATOR, Segment, build_segment
from ..store import SegmentStore
from .delta_log import DeltaEvent, Folded, text_digest
from .settings import Fingerprint, LearningSettings

# A text counts as many times as its rounded weight, up to this limit.
MAX_COPIES = 4
# Texts of lower weight are dropped: six half-lives after learning, if they were not used.
LEAST_WEIGHT = 1 / 64


@dataclass(slots=True, eq=False)
class _Text:
    tokens: Int32
    data: bytes
    weight: float
    time: float
    order: int

    def weight_at(self, time: float, half_life: float) -> float:
        return self.weight * 0.5 ** (max(time - self.time, 0.0) / half_life)


class WeightedTexts:
    """Keeps at most `max_tokens` tokens: texts of the lowest weight go first, of equals the oldest.

    half_life  time in which a weight halves, in the unit of all times here
    """

    def __init__(self, max_tokens: int, half_life: float) -> None:
        self._max_tokens = max_tokens
        self._half_life = half_life
        self._texts: dict[str, _Text] = {}
        self._num_added = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, digest: str) -> bool:
        return digest in self._texts

    def apply(self, event: DeltaEvent, time: float) -> None:
        """Add a text, or weight to one that is known; weight for an unknown one is ignored."""
        text = self._texts.get(event.digest)
        if text is not None:
            text.weight = text.weight_at(time, self._half_life) + event.weight
            text.time = max(text.time, time)
        elif event.tokens is not None and 0 < len(event.tokens) <= self._max_tokens:
            data = event.tokens.astype("<i4").tobytes()
            self._num_added += 1
            added = _Text(event.tokens, data, event.weight, time, self._num_added)
            self._texts[event.digest] = added
            self.num_tokens += len(event.tokens)

    def prune(self, time: float, oldest: float = -np.inf) -> bool:
        """Drop texts last used before `oldest`, of too low a weight, or over the limit; True if
        any.

        Over the limit, texts of the lowest weight at `time` go first.
        """
        weights = self.weights(time)
        order = sorted(self._texts, key=lambda name: (weights[name], self._texts[name].order))
        before = len(self._texts)
        for digest in order:
            text = self._texts[digest]
            is_over = self.num_tokens > self._max_tokens
            if is_over or weights[digest] < LEAST_WEIGHT or text.time < oldest:
                del self._texts[digest]
                self.num_tokens -= len(text.tokens)
        return len(self._texts) < before

    def weights(self, time: float) -> dict[str, float]:
        """Digest -> weight at `time`."""
        return {
            digest: text.weight_at(time, self._half_life) for digest, text in self._texts.items()
        }

    def documents(self, time: float) -> list[Int32]:
        """int32 [n] each, oldest first; a text of weight w stands there round(w) times."""
        weights = self.weights(time)
        copies: list[Int32] = []
        for digest, text in self._texts.items():
            copies += [text.tokens] * min(MAX_COPIES, max(1, round(weights[digest])))
        return copies

    def holding(self, run: Int32) -> set[str]:
        """Digests of the texts that hold `run` somewhere."""
        wanted = run.astype("<i4").tobytes()
        return {digest for digest, text in self._texts.items() if _holds(text.data, wanted)}


def _holds(data: bytes, wanted: bytes) -> bool:
    """Whether `data` contains `wanted` aligned to an int32."""
    at = data.find(wanted)
    while at % 4 and at >= 0:
        at = data.find(wanted, at + 1)
    return at >= 0


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
    """The texts of the last fold with their weights; empty if its segment is no longer listed.

    In that case `corpus build` replaced it, or a compaction merged it. Raises `StoreError`, and
    `DamagedError` if the segment cannot be read. No text is newer than `now`.
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
