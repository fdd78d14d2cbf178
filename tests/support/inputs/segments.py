"""Small segments for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from draftline.retrieval_store.segment.segment import Segment, build_segment


def make_segment(
    documents: Sequence[Sequence[int]],
    vocab_size: int = 32,
    tokenizer_hash: str = "tokenizer",
    model_hash: str = "model",
) -> Segment:
    """The segment of documents given as plain lists."""
    return build_segment(
        [np.array(document, dtype=np.int32) for document in documents],
        tokenizer_hash=tokenizer_hash,
        model_hash=model_hash,
        vocab_size=vocab_size,
    )


def context(*tokens: int) -> np.ndarray:
    """A context as lookups take it."""
    return np.array(tokens, dtype=np.int32)
