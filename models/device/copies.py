"""Copies between the host and a device that nobody waits for before the numbers are needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of integers on `device`, int64; work that is launched later sees it."""
    tensor = torch.from_numpy(array.astype(np.int64))
    if device.type == "cuda":
        # From pinned memory alone does a copy not wait for all work before it.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """Tensors of one device on their way to the host, by one copy; begins at once.

    Element sizes may fall from one tensor to the next, not rise.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._copied: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            packed = pack(tensors)
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once they are there; on a CPU the tensors themselves."""
        if self._copied is None:
            return list(self._tensors)
        self._copied.synchronize()
        return unpack(self._host, self._tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors one behind the other, uint8 [bytes]."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into `packed` with the shapes and dtypes of `like`: what was packed."""
    parts = packed.split([tensor.nbytes for tensor in like])
    return [
        part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)
    ]
