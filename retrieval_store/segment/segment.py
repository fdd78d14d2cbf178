"""A segment: an immutable corpus of token ids, sorted so that any context is found by bisection.

It is a trie over all windows of the documents, kept as a suffix array: a trie node is a range of
sorted suffixes that begin with the node's tokens, and its count is the length of the range. This
costs about 10 bytes a token whatever the depth, where explicit nodes would cost some hundreds.
See docs/retrieval.md, "Segments".
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ...core.arrays import Int32
from ...core.errors import ConfigError, DamagedError, StoreError
from .packed_file import Data, pack, unpack
from .suffix_array import sort_suffixes
from .wide_nodes import wide_nodes

MAX_CONTEXT = 16
MAX_CONTINUATION = 16
DEPTH = MAX_CONTEXT + MAX_CONTINUATION
SEPARATOR = 0xFFFFFFFF
MAX_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Size of a segment, and the model that it is built for.

    tokenizer_hash, model_hash  fingerprints of the tokenizer and of the target that refined it
    vocab_size                  all token ids are below it
    num_documents, num_tokens   separators not counted
    depth                       suffixes are sorted by this many tokens
    """

    tokenizer_hash: str
    model_hash: str
    vocab_size: int
    num_documents: int
    num_tokens: int
    depth: int = DEPTH


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A read-only segment over its own bytes, which may be memory-mapped.

    text           big-endian uint32 [n]  documents, each followed by SEPARATOR; big-endian, so
                   that comparing bytes compares tokens
    suffixes       uint32 [n]  positions in `text`, sorted by the `depth` tokens from there
    common_lens    uint8 [n]   tokens that suffix i shares with suffix i - 1, at most `depth`
    first_places   uint32 [vocab_size + 1]  suffixes that begin with token t are
                   first_places[t]:first_places[t + 1]; halves the time of a search
    wide_nodes, wide_children  uint32 [m + 1, 4], uint32 [k, 4]  see `wide_nodes.py`
    """

    data: Data
    header: SegmentHeader
    text: NDArray[np.uint32]
    suffixes: NDArray[np.uint32]
    common_lens: NDArray[np.uint8]
    first_places: NDArray[np.uint32]
    wide_nodes: NDArray[np.uint32]
    wide_children: NDArray[np.uint32]

    @classmethod
    def from_data(cls, data: Data, origin: str) -> Self:
        """Check and read a segment; `origin` names the file in the `StoreError` raised if bad."""
        fields, arrays = unpack(data, origin)
        try:
            header = SegmentHeader(**fields)
            segment = cls(data, header, **arrays)
        except (KeyError, TypeError) as error:
            raise DamagedError(f"{origin}: not a retrieval segment; build it again") from error
        segment._check_sizes(origin)
        return segment

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a segment file into memory. Raises `StoreError` if it is missing or corrupt."""
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, ValueError) as error:
            raise DamagedError(f"{path}: cannot be read ({error}); build it again") from error
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error}); build the corpus again") from error
        return cls.from_data(data, str(path))

    @property
    def segment_id(self) -> str:
        """The name of the content: 32 hexadecimal digits; equal corpora have equal names."""
        return hashlib.sha256(self.data).hexdigest()[:32]

    def _check_sizes(self, origin: str) -> None:
        size = (self.header.num_tokens + self.header.num_documents,)
        same = self.text.shape == self.suffixes.shape == self.common_lens.shape == size
        places = self.first_places.shape == (self.header.vocab_size + 1,)
        table = self.wide_nodes.shape[1:] == self.wide_children.shape[1:] == (4,)
        if not (same and places and table and self.header.depth == DEPTH):
            raise DamagedError(f"{origin}: counts do not agree with the arrays; build it again")

    def require(
        self,
        origin: str,
        *,
        tokenizer_hash: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Raise `StoreError` unless the segment was built for these; None is not checked."""
        wanted = {"tokenizer_hash": tokenizer_hash, "vocab_size": vocab_size}
        for field, value in wanted.items():
            built_for = getattr(self.header, field)
            if value is not None and built_for != value:
                raise StoreError(
                    f"{origin}: {field} is {built_for}, the served model has {value}; "
                    "build the corpus with this model, or point to its own store"
                )


def build_segment(
    documents: Sequence[Int32], *, tokenizer_hash: str, model_hash: str, vocab_size: int
) -> Segment:
    """Sort `documents` (int32 token ids below `vocab_size`) into a segment.

    No match crosses from one document into the next. Takes about 3 seconds a million tokens and 25
    bytes of memory a token, the segment's own included. Raises `ConfigError` for ids outside the
    vocabulary, and for a corpus that needs more than one segment.
    """
    text = _join(documents, vocab_size)
    suffixes, common_lens = sort_suffixes(text, DEPTH)
    header = SegmentHeader(
        tokenizer_hash=tokenizer_hash,
        model_hash=model_hash,
        vocab_size=vocab_size,
        num_documents=len(documents),
        num_tokens=len(text) - len(documents),
    )
    nodes, children = wide_nodes(text, suffixes, common_lens)
    arrays = {
        "text": text.astype(">u4"),
        "suffixes": suffixes.astype("<u4", copy=False),
        "common_lens": common_lens,
        "wide_children": children,
        "wide_nodes": nodes,
        "first_places": first_places(text, suffixes, common_lens, vocab_size),
    }
    del text
    return Segment.from_data(pack(asdict(header), arrays), "new segment")


def first_places(
    text: NDArray[np.uint32],
    suffixes: NDArray[np.uint32],
    common_lens: NDArray[np.uint8],
    vocab_size: int,
) -> NDArray[np.uint32]:
    """uint32 [vocab_size + 1]: how many suffixes begin with a token below each."""
    starts = np.flatnonzero(common_lens == 0)
    first_start = np.searchsorted(text[suffixes[starts]], np.arange(vocab_size + 1))
    return np.append(starts, len(suffixes))[first_start].astype("<u4")


def _join(documents: Sequence[Int32], vocab_size: int) -> NDArray[np.uint32]:
    size = sum(len(document) + 1 for document in documents)
    if size > MAX_TOKENS:
        raise ConfigError("documents", f"{size} tokens; split them into segments of {MAX_TOKENS}")
    text = np.full(size, SEPARATOR, dtype=np.uint32)
    start = 0
    for document in documents:
        if len(document) and (document.min() < 0 or document.max() >= vocab_size):
            raise ConfigError(
                "documents", f"a token id is not below {vocab_size}; use the target's tokenizer"
            )
        text[start : start + len(document)] = document
        start += len(document) + 1
    return text
