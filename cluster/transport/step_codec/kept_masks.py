"""Token masks by number, on both ends of a message: a grammar has few, and rows repeat them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....core.arrays import Int32, Int64, UInt32, UInt64
from ....core.compiled import compiled
from .step_difference import MaskChanges
from .typed_array import ends_of, expect, expect_flat, typed

# Bytes of masks that are kept, if a step has no more.
MAX_BYTES = 64 << 20
FIRST_ROWS = 64
FREE = -1
# An odd constant of many bits (the golden ratio's), which spreads the words' weights.
SPREAD = 0x9E3779B97F4A7C15


class SentMasks:
    """The sender's end: the masks that the other end has, and their numbers."""

    __slots__ = ("_free", "_hashes", "_masks", "_most", "_now", "_table", "_used", "_weights")

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
        self._now += 1
        new: list[int] = []
        ids = [self._ids_of(mask, new) for mask in masks]
        new_ids = np.array(new, dtype=np.int32)
        return MaskChanges(num_words, np.concatenate(ids), new_ids, self._masks[new_ids])

    def _start(self, num_words: int) -> None:
        self._most = max(1, MAX_BYTES // max(1, 4 * num_words))
        weights = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(SPREAD)
        # Odd, so that no bit of a word is without weight.
        self._weights = (weights >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        self._masks = np.zeros((0, num_words), dtype=np.uint32)
        self._hashes = np.zeros(0, dtype=np.uint64)
        # The message that each was in last; of numbers that are free, none.
        self._used = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []
        self._now = 0
        self._grow()

    def _ids_of(self, mask: UInt32, new: list[int]) -> Int32:
        """The number of each row; those that the other end does not have go to `new`."""
        ids, hashes = self._found(mask)
        # Before anything is added, which may be in the place of what is not in use.
        self._used[ids[ids >= 0]] = self._now
        for row in np.flatnonzero(ids < 0).tolist():
            # A row before it may have been the same.
            (ids[row],), _ = self._found(mask[row : row + 1])
            if ids[row] < 0:
                ids[row] = self._added(mask[row], hashes[row])
                new.append(int(ids[row]))
        return ids

    def _found(self, mask: UInt32) -> tuple[Int32, UInt64]:
        return _find(mask, self._weights, self._masks, self._hashes, self._table)

    def _added(self, mask: UInt32, key: np.uint64) -> int:
        if not self._free:
            if len(self._masks) < self._most:
                self._grow()
            else:
                self._forget()
        number = self._free.pop()
        self._masks[number], self._hashes[number] = mask, key
        self._used[number] = self._now
        _insert(self._table, self._hashes, np.array([number]))
        return number

    def _grow(self) -> None:
        first = len(self._masks)
        self._masks = _with_room(self._masks, first + 1)
        count = len(self._masks)
        self._hashes = np.resize(self._hashes, count)
        self._used = np.concatenate((self._used, np.zeros(count - first, dtype=np.int64)))
        # The last are taken first.
        self._free += range(count - 1, first - 1, -1)
        self._rebuild()

    def _forget(self) -> None:
        """Free the half that was used longest ago, none of which is of this message.

        There are no more masks in a message than there is room for.
        """
        oldest = self._used.argsort(kind="stable")[: -(-len(self._used) // 2)]
        oldest = oldest[self._used[oldest] < self._now]
        self._used[oldest] = 0
        self._free += oldest.tolist()
        self._rebuild()

    def _rebuild(self) -> None:
        # Four places a mask, so that searches end soon.
        self._table = np.full(1 << (4 * len(self._masks)).bit_length(), FREE, dtype=np.int32)
        _insert(self._table, self._hashes, np.flatnonzero(self._used))


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
def _insert(table: Int32, hashes: UInt64, numbers: Int64) -> None:
    """Enter masks by their hashes: each at its place in the table, or the next that is free."""
    for number in numbers:
        place = hashes[number] & np.uint64(len(table) - 1)
        while table[place] != FREE:
            place = (place + np.uint64(1)) & np.uint64(len(table) - 1)
        table[place] = number


@compiled
def _find(
    masks: UInt32, weights: UInt32, kept: UInt32, hashes: UInt64, table: Int32
) -> tuple[Int32, UInt64]:
    """The number of each mask among those kept, or -1; and its hash, of 64 bits.

    A hash sums words by weights (multilinear hashing), so equal hashes are only a hint.
    """
    ids = np.full(len(masks), FREE, dtype=np.int32)
    own_hashes = np.empty(len(masks), dtype=np.uint64)
    for row in range(len(masks)):
        words, total = masks[row], np.uint64(0)
        for index in range(len(words)):
            total += np.uint64(words[index]) * np.uint64(weights[index])
        own_hashes[row] = total
        place = total & np.uint64(len(table) - 1)
        while table[place] != FREE:
            number = table[place]
            if hashes[number] == total and _are_equal(kept[number], words):
                ids[row] = number
                break
            place = (place + np.uint64(1)) & np.uint64(len(table) - 1)
    return ids, own_hashes


@compiled
def _are_equal(left: UInt32, right: UInt32) -> bool:
    bits = np.uint32(0)
    for index in range(len(right)):
        bits |= left[index] ^ right[index]
    return bits == 0
