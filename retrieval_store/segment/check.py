"""Checks of a segment beyond its checksums: the invariants that lookups rely on."""

from __future__ import annotations

import numpy as np

from ...core.compiled import compiled
from ...core.errors import StoreError
from .segment import DEPTH, SEPARATOR, Segment, first_places
from .suffix_array import Uint8, Uint32
from .wide_nodes import wide_nodes


def check_segment(segment: Segment, origin: str) -> None:
    """Check token ids, ends of documents, the order of all suffixes and the tables made of them.

    `Segment.from_data` has checked the bytes. Raises `StoreError` that names `origin`.
    """
    text = segment.text.astype(np.uint32)
    is_separator = text == SEPARATOR
    ended = not len(text) or bool(is_separator[-1])
    if not ended or int(is_separator.sum()) != segment.header.num_documents:
        raise _unsound(origin, "documents do not end where they should")
    if len(text) and int(text.max(initial=0, where=~is_separator)) >= segment.header.vocab_size:
        raise _unsound(origin, f"a token id is not below {segment.header.vocab_size}")
    place = _first_unsound(text, segment.suffixes, segment.common_lens)
    if place >= 0:
        raise _unsound(origin, f"suffix {place} is not in its place")
    places = first_places(text, segment.suffixes, segment.common_lens, segment.header.vocab_size)
    nodes, children = wide_nodes(text, segment.suffixes, segment.common_lens)
    tables = {"first_places": places, "wide_nodes": nodes, "wide_children": children}
    for name, wanted in tables.items():
        if not np.array_equal(getattr(segment, name), wanted):
            raise _unsound(origin, f"the table {name} does not agree with the suffixes")


def _unsound(origin: str, fault: str) -> StoreError:
    return StoreError(f"{origin}: {fault}; remove the segment and build it again")


@compiled
def _first_unsound(text: Uint32, suffixes: Uint32, common_lens: Uint8) -> int:
    """The first place that breaks the order or repeats a position; -1 if there is none."""
    seen = np.zeros(len(text), dtype=np.uint8)
    for place in range(len(suffixes)):
        position = int(suffixes[place])
        if position >= len(text) or seen[position]:
            return place
        seen[position] = 1
        previous = int(suffixes[place - 1]) if place else len(text)
        shared = 0
        while shared < DEPTH and max(position, previous) + shared < len(text):
            if text[position + shared] != text[previous + shared]:
                break
            shared += 1
        if place and not _is_after(text, position, previous, shared):
            return place
        if common_lens[place] != shared:
            return place
    return -1


@compiled
def _is_after(text: Uint32, position: int, previous: int, shared: int) -> bool:
    if shared == DEPTH:
        return position > previous
    if previous + shared >= len(text):
        return True
    return position + shared < len(text) and text[position + shared] > text[previous + shared]
