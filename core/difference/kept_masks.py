"""Token masks by number, on both ends of a message: a grammar has few, and rows repeat them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..arrays import Bool, Int32, UInt32, UInt64
from ..compiled import compiled
from .step_difference import MaskChanges
from .typed_array import ends_of, expect, expect_flat, typed

# Bytes of masks that are kept, if a step has no more.
MAX_BYTES = 64 << 20
FIRST_ROWS = 64
# An odd constant of many bits (the golden ratio's), which spreads the words' weights.
SPREAD = 0x9E3779B97F4A7C15


class SentMasks:
    """The sender's end: the masks that the other end has, and their numbers."""

    __slots__ = ("_ids", "_masks", "_most", "_weights")

    def __init__(self) -> None:
        self._start(0)

    def changes(self, masks: Sequence[UInt32]) -> MaskChanges | None:
        """The numbers of the rows of all masks uint32 [rows, words], and the masks that are new.

        None without any row. Raises `TypeError` for masks of several vocabularies.
        """
        if not masks:
            return None
        masks = [typed(mask, np.uint32, 2, "mask") for mask in masks]
        num_words = masks[0].shape[1]
        if any(mask.shape[1] != num_words for mask in masks):
            raise TypeError("masks are of several vocabularies")
        if num_words != self._masks.shape[1]:
            self._start(num_words)
        self._most = max(self._most, sum(map(len, masks)))
        new: list[int] = []
        ids = [self._ids_of(mask, new) for mask in masks]
        new_ids = np.array(new, dtype=np.int32)
        return MaskChanges(num_words, np.concatenate(ids), new_ids, self._masks[new_ids])

    def _start(self, num_words: int) -> None:
        self._masks = np.zeros((0, num_words), dtype=np.uint32)
        self._most = max(1, MAX_BYTES // max(1, 4 * num_words))
        weights = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(SPREAD)
        # Odd, so that no bit of a word is without weight.
        self._weights = (weights ^ (weights >> np.uint64(29))) * np.uint64(SPREAD) | np.uint64(1)
        # Least recently used first. No more masks than there is room for are of one message, so
        # what it refers to is never given up for another of it.
        self._ids: OrderedDict[int, int] = OrderedDict()

    def _ids_of(self, mask: UInt32, new: list[int]) -> Int32:
        """The number of each row; those that the other end does not have go to `new`."""
        hashes = _hashes(mask, self._weights).tolist()
        found = [self._ids.get(key, -1) for key in hashes]
        ids = np.array(found, dtype=np.int32)
        is_kept = _equal(self._masks, ids, mask)
        for row, key in enumerate(hashes):
            if is_kept[row] and self._ids.get(key) == found[row]:
                self._ids.move_to_end(key)
            else:
                ids[row] = self._added(key, mask[row], new)
        return ids

    def _added(self, key: int, mask: UInt32, new: list[int]) -> int:
        """The number of a mask that was not there before this message."""
        while (known := self._ids.get(key)) is not None:
            if np.array_equal(self._masks[known], mask):
                self._ids.move_to_end(key)
                return known
            key += 1
        if len(self._ids) < self._most:
            number = len(self._ids)
            self._masks = _with_room(self._masks, number + 1)
        else:
            _, number = self._ids.popitem(last=False)
        self._ids[key] = number
        self._masks[number] = mask
        new.append(number)
        return number


class ReceivedMasks:
    """The receiver's end: masks by number."""

    __slots__ = ("_masks",)

    def __init__(self) -> None:
        self._masks = np.zeros((0, 0), dtype=np.uint32)

    def apply(self, changes: MaskChanges, counts: Int32) -> list[UInt32]:
        """The masks that the other end's `changes` was given, by their numbers of rows.

        Raises `ProtocolError` for what the other end cannot have made.
        """
        ids, new_ids, new_masks = changes.ids, changes.new_ids, changes.new_masks
        expect_flat("masks", ids, new_ids)
        is_whole = new_masks.shape == (len(new_ids), changes.num_words)
        expect(is_whole, "masks are cut short")
        if changes.num_words != self._masks.shape[1]:
            self._masks = np.zeros((0, changes.num_words), dtype=np.uint32)
        num_known = len(self._masks)
        if len(new_ids):
            expect(
                new_ids.min() >= 0 and new_ids.max() < num_known + len(new_ids),
                "new masks have no numbers",
            )
            self._masks = _with_room(self._masks, int(new_ids.max()) + 1)
            self._masks[new_ids] = new_masks
        if len(ids):
            fits = ids.min() >= 0 and ids.max() < len(self._masks)
            expect(fits, "masks are not known here")
        ends = ends_of(counts, len(ids), "masks")
        masks = self._masks.take(ids, axis=0)
        return [masks[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _with_room(masks: UInt32, count: int) -> UInt32:
    if count <= len(masks):
        return masks
    grown = np.zeros((max(count, 2 * len(masks), FIRST_ROWS), masks.shape[1]), dtype=np.uint32)
    grown[: len(masks)] = masks
    return grown


@compiled
def _hashes(masks: UInt32, weights: UInt64) -> UInt64:
    """A number of 64 bits for each row: words by weights, summed (multilinear hashing)."""
    hashes = np.empty(len(masks), dtype=np.uint64)
    for row in range(len(masks)):
        words, total = masks[row], np.uint64(0)
        for index in range(len(words)):
            total += np.uint64(words[index]) * weights[index]
        hashes[row] = total
    return hashes


@compiled
def _equal(known: UInt32, ids: Int32, masks: UInt32) -> Bool:
    """Whether row i of `masks` is mask `ids[i]`; of no mask where that is -1."""
    is_equal = np.zeros(len(ids), dtype=np.bool_)
    for row in range(len(ids)):
        if ids[row] >= 0:
            old, new, bits = known[ids[row]], masks[row], np.uint32(0)
            for index in range(len(new)):
                bits |= old[index] ^ new[index]
            is_equal[row] = bits == 0
    return is_equal
