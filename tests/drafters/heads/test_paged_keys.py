"""What a head of the last stage keeps: paged keys, and rows that wait to be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.drafters.heads import waiting_rows
from draftline.drafters.heads.networks.kept_keys import KeptKeys
from draftline.drafters.heads.networks.paged_keys import PagedKeys
from draftline.drafters.heads.waiting_rows import Rows, WaitingRows, joined
from draftline.models.attention.step_attention import PagedKv
from torch import Tensor

NUM_LAYERS = 2


def pairs(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 4), torch.randn(count, 1, 4)


def test_keys_of_several_steps_are_those_that_were_kept_at_once() -> None:
    kv = PagedKv(NUM_LAYERS, 32, 1, 4)
    slots = torch.randperm(32)[:11]
    whole, end = KeptKeys(NUM_LAYERS), 0
    for count in (5, 1, 5):
        own = PagedKeys(kv, slots[: end + count], end)
        for layer in range(NUM_LAYERS):
            keys, values = pairs(count)
            torch.testing.assert_close(
                own.append(layer, keys, values), whole.append(layer, keys, values)
            )
        own.num_rows += count
        whole.num_rows += count
        end += count
        for layer in range(NUM_LAYERS):
            torch.testing.assert_close(own.layer(layer), whole.layer(layer))
    # Nothing is written elsewhere.
    others = [slot for slot in range(32) if slot not in slots.tolist()]
    assert not kv.data[:, others].any()


def test_a_text_of_which_nothing_is_kept() -> None:
    own = PagedKeys(PagedKv(1, 8, 1, 4), torch.tensor([3]), 0)
    assert own.layer(0) is None
    keys, values = pairs(1)
    assert own.append(0, keys, values).shape == (2, 1, 1, 4)


def rows(first: int, count: int) -> Rows:
    positions = np.arange(first, first + count, dtype=np.int32)
    return Rows(torch.from_numpy(positions[:, None].astype(np.float32)), positions + 1, positions)


def positions_of(parts: list[Rows]) -> list[int]:
    whole = joined(parts) if parts else rows(0, 0)
    assert whole.features[:, 0].tolist() == whole.positions.tolist()
    assert whole.following.tolist() == (whole.positions + 1).tolist()
    return whole.positions.tolist()


def test_rows_wait_in_the_order_of_their_positions() -> None:
    waiting = WaitingRows()
    waiting.add(1, rows(0, 3))
    waiting.add(1, rows(3, 1))
    waiting.add(2, rows(7, 2))
    assert positions_of(waiting.take(1, 4)) == [0, 1, 2, 3]
    assert positions_of(waiting.take(1, 4)) == []
    # What is computed anew in the step that reads is not read twice.
    assert positions_of(waiting.take(2, 8)) == [7]


def test_rows_that_are_computed_again_take_the_place_of_those_that_wait() -> None:
    waiting = WaitingRows()
    waiting.add(1, rows(0, 6))
    waiting.add(1, rows(2, 2))
    assert positions_of(waiting.take(1, 9)) == [2, 3]


def test_a_copy_is_kept() -> None:
    waiting, own = WaitingRows(), rows(0, 2)
    waiting.add(1, own)
    own.features.zero_()
    assert waiting.take(1, 2)[0].features[:, 0].tolist() == [0, 1]


def test_old_rows_and_requests_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_rows, "MOST_ROWS", 4)
    monkeypatch.setattr(waiting_rows, "MOST_ROWS_OF_ALL", 6)
    waiting = WaitingRows()
    waiting.add(1, rows(0, 9))
    assert positions_of(waiting.take(1, 9)) == [5, 6, 7, 8]
    waiting.add(1, rows(0, 3))
    waiting.add(1, rows(3, 2))
    assert positions_of(waiting.take(1, 9)) == [3, 4]
    waiting.add(1, rows(0, 3))
    waiting.add(2, rows(0, 3))
    waiting.add(1, rows(3, 1))
    # The second was seen least of late.
    assert positions_of(waiting.take(2, 9)) == []
    assert positions_of(waiting.take(1, 9)) == [0, 1, 2, 3]
    waiting.add(3, rows(0, 2))
    waiting.clear()
    assert waiting.take(3, 9) == []
