"""Keys and values that a head keeps in blocks."""

from __future__ import annotations

import torch
from draftline.drafters.heads.networks.kept_keys import KeptKeys
from draftline.drafters.heads.networks.paged_keys import PagedKeys
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
