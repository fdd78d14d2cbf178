"""Copies between host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.models.device import HostCopy, pack, to_device, unpack
from torch import Tensor

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def tensors(device: str) -> list[Tensor]:
    """Tensors of many shapes, one of them empty, one not contiguous."""
    random = torch.Generator().manual_seed(3)
    numbers = torch.randn(5, 6, generator=random)
    whole = torch.arange(12, dtype=torch.int32)
    parts = [whole, whole[:0].view(0, 4), numbers.t(), numbers[1], numbers.to(torch.bfloat16)]
    return [part.to(device) for part in parts]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=0, atol=0)
        assert one.device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_what_was_packed_is_unpacked(device: str) -> None:
    wanted = tensors(device)
    packed = pack(wanted)
    assert packed.dtype == torch.uint8
    same(unpack(packed.cpu(), wanted), wanted)
    same(unpack(pack(wanted[2:3]).cpu(), wanted[2:3]), wanted[2:3])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_copy_is_of_the_numbers_at_its_time(device: str) -> None:
    wanted = tensors(device)
    expected = [tensor.clone() for tensor in wanted]
    copy = HostCopy(wanted)
    if device == "cuda":
        # Work behind the copy does not reach what was copied.
        for tensor in wanted:
            tensor.zero_()
    same(copy.wait(), expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_whole_numbers_reach_the_device(device: str) -> None:
    array = np.array([[3, -1], [2**31 - 1, 0]], dtype=np.int32)
    found = to_device(array, torch.device(device))
    assert found.dtype == torch.int64
    assert found.tolist() == array.tolist()
