import resource

import numpy as np
import torch
from draftline.models.attention.step_attention import PagedKv
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS = 12


def filled() -> PagedKv:
    kv = PagedKv(2, SLOTS, 3, 4)
    kv.data.copy_(torch.randn(kv.data.shape))
    return kv


@settings(deadline=None)
@given(
    st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS),
    st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True),
)
def test_moves_read_all_slots_before_any_is_written(sources: list[int], targets: list[int]) -> None:
    count = min(len(sources), len(targets))
    kv = filled()
    wanted = kv.data.clone().numpy()
    wanted[:, targets[:count]] = wanted[:, sources[:count]]
    moves = np.array([sources[:count], targets[:count]], dtype=np.int64).T.reshape(-1, 2)
    kv.move(torch.from_numpy(moves))
    np.testing.assert_array_equal(kv.data.numpy(), wanted)


def test_a_move_copies_no_more_than_its_slots() -> None:
    """Layers of a large cache do not lie one behind the other (`kernels/cpu/large_pages.py`)."""
    kv, last = PagedKv(8, 2**14, 2, 64), 2**14 - 1
    assert not kv.data.is_contiguous()
    kv.data.copy_(torch.arange(last + 1)[:, None, None, None].expand(kv.data.shape))
    kv.move(torch.tensor([[9, 4], [last, 9]]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kv.move(torch.tensor([[10, 5], [last, 10]]))
    # A copy of it takes 32,768 pages, or as many faults.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000
    for layer in kv.layers:
        assert layer[[4, 5, 9, 10, 11], 0, 0, 0].tolist() == [9, 10, last, last, 11]


def test_scattered_and_contiguous_slots_are_the_same_places() -> None:
    pairs = torch.randn(4, 2, 3, 4)
    one, other = filled(), PagedKv(2, SLOTS, 3, 4)
    other.data.copy_(one.data)
    one.write(1, slice(5, 9), pairs)
    other.write(1, torch.tensor([5, 6, 7, 8]), pairs)
    assert torch.equal(one.data, other.data)
    assert torch.equal(one.gather(1, slice(5, 9)), pairs)
    assert torch.equal(one.gather(1, torch.tensor([8, 5])), pairs[[3, 0]])
    assert not torch.equal(one.gather(0, slice(5, 9)), pairs)
