"""Tensors in large pages are the same tensors."""

from __future__ import annotations

import mmap
from itertools import pairwise

import pytest
import torch
from draftline.kernels.cpu import large_pages
from draftline.kernels.cpu.large_pages import LARGE_PAGE, LargePages, zeros


def test_copies_hold_their_numbers_wherever_they_come_to_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some fill a block, some go on in it, one is larger than any.
    monkeypatch.setattr(large_pages, "BLOCK", 4096)
    pages = LargePages()
    tensors = [
        torch.arange(1500).to(dtype).view(3, -1)
        for dtype in (torch.uint8, torch.float16, torch.int8, torch.float32, torch.float64) * 3
    ]
    tensors += [torch.empty(0, 3), torch.arange(12.0).view(3, 4).t()]
    copies = [pages.copy(tensor) for tensor in tensors]
    for tensor, copied in zip(tensors, copies, strict=True):
        assert copied.dtype == tensor.dtype
        assert copied.is_contiguous()
        assert torch.equal(copied, tensor)


def test_numbers_of_four_and_eight_bits_are_copied() -> None:
    codes = torch.arange(64, dtype=torch.uint8)
    pages = LargePages()
    for dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e4m3fn):
        copied = pages.copy(codes.view(dtype))
        assert copied.dtype == dtype
        assert torch.equal(copied.view(torch.uint8), codes)


class RefusingMemory(mmap.mmap):
    """Of a system without large pages."""

    def madvise(self, *advice: int) -> None:
        raise OSError(22, f"Invalid argument: {advice}")


def test_a_system_without_large_pages_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", RefusingMemory)
    assert torch.equal(LargePages().copy(torch.arange(1000)), torch.arange(1000))
    assert torch.equal(zeros((3, 4), torch.float32), torch.zeros(3, 4))


def test_memory_stays_as_long_as_one_of_its_tensors() -> None:
    pages = LargePages()
    first = pages.copy(torch.arange(1000))
    pages.copy(torch.zeros(1000))
    del pages
    assert torch.equal(first, torch.arange(1000))


def test_zeros_begin_at_a_page() -> None:
    found = zeros((3, 5, 2), torch.bfloat16)
    assert torch.equal(found, torch.zeros(3, 5, 2, dtype=torch.bfloat16))
    assert found.data_ptr() % LARGE_PAGE == 0
    # A stage without attention, and a cache of a head without layers.
    for shape in ((0, 4), (3, 0), (0, LARGE_PAGE)):
        assert zeros(shape, torch.float32).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_large_parts_take_their_pages_at_different_times(dtype: torch.dtype) -> None:
    """What a step writes to all layers of a cache lies near a page's end in one of them at most."""
    found = zeros((8, LARGE_PAGE // 8, 8), dtype)
    places = sorted(part.data_ptr() % LARGE_PAGE for part in found)
    assert min(after - before for before, after in pairwise(places)) >= LARGE_PAGE // 16
    assert all(part.is_contiguous() for part in found)
    found.fill_(1)
    assert found.sum(dtype=torch.int64) == found.numel()
