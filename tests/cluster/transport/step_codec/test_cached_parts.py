"""What both ends keep stays the same while there is little room for it."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.cluster.transport.step_codec import encoder
from draftline.cluster.transport.step_codec.decoder import ReceivedMasks
from draftline.cluster.transport.step_codec.encoder import RequestSlots, SentMasks
from draftline.core.errors import ProtocolError
from hypothesis import given
from hypothesis import strategies as st

NUM_WORDS = 2
MASK_BYTES = 4 * NUM_WORDS

rows = st.lists(st.integers(0, 200), min_size=1, max_size=12)


@given(st.lists(st.lists(rows, min_size=1, max_size=3), max_size=30))
def test_masks_come_back_where_few_are_kept(messages: list[list[list[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "MAX_MASK_BYTES", 70 * MASK_BYTES)
        sender, receiver = SentMasks(), ReceivedMasks()
        most_rows = 0
        for message in messages:
            masks = [np.array([[row, row % 3] for row in own], dtype=np.uint32) for own in message]
            changes = sender.changes(masks)
            assert changes is not None
            counts = np.array(list(map(len, masks)), dtype=np.int32)
            for got, mask in zip(receiver.apply(changes, counts), masks, strict=True):
                assert np.array_equal(got, mask)
            most_rows = max(most_rows, int(counts.sum()))
        assert len(sender._masks) <= 2 * max(70, most_rows)


def test_masks_of_equal_hash_are_told_apart() -> None:
    """A hash sums words by weights, so masks can be made that have the same."""
    sender, receiver = SentMasks(), ReceivedMasks()
    sender._start(NUM_WORDS)
    first, second = (int(weight) for weight in sender._weights)
    masks = [np.array([[second, 0]], dtype=np.uint32), np.array([[0, first]], dtype=np.uint32)]
    for _ in range(2):
        changes = sender.changes(masks)
        assert changes is not None
        got = receiver.apply(changes, np.array([1, 1], dtype=np.int32))
        assert [mask.tolist() for mask in got] == [[[second, 0]], [[0, first]]]
    assert not len(changes.new_masks)


def test_a_mask_that_is_not_known_is_refused() -> None:
    sender = SentMasks()
    mask = np.ones((1, NUM_WORDS), dtype=np.uint32)
    for _ in range(2):
        changes = sender.changes([mask])
    assert changes is not None
    with pytest.raises(ProtocolError, match="masks are not known here"):
        ReceivedMasks().apply(changes, np.array([1], dtype=np.int32))


@given(st.lists(st.sets(st.integers(0, 9), max_size=5), max_size=30))
def test_no_two_requests_of_a_step_share_a_slot(steps: list[set[int]]) -> None:
    slots = RequestSlots(3)
    most = 3
    for keys in steps:
        placed = slots.place(sorted(keys)).tolist()
        most = max(most, len(keys))
        assert len(set(placed)) == len(keys)
        assert all(slot < most for slot in placed)


def test_a_request_keeps_its_slot_and_the_one_used_longest_ago_goes() -> None:
    slots = RequestSlots(3)
    first = slots.place([1, 2, 3]).tolist()
    assert slots.place([3, 1]).tolist() == [first[2], first[0]]
    assert slots.place([7]).tolist() == [first[1]]
    assert slots.place([1, 3, 7]).tolist() == [first[0], first[2], first[1]]
    assert len(set(slots.place([5, 5]).tolist())) == 2
