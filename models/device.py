"""A model's device and dtype, and asynchronous copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError

AUTO = "auto"
# A container's own, as it sees it.
CGROUP = Path("/sys/fs/cgroup")
HALVES = ("bfloat16", "float16")


def choose_device(setting: str, *, has_gpu: bool | None = None) -> str:
    """cpu or cuda. Raises `ConfigError` (`device`) if cuda is requested and there is no GPU.

    has_gpu  by default, whether torch finds one
    """
    has_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    if setting == "cuda" and not has_gpu:
        raise ConfigError("device", "is cuda, but torch sees no GPU; use auto or cpu")
    if setting == AUTO:
        return "cuda" if has_gpu else "cpu"
    return setting


def choose_dtype(setting: str, device: str, checkpoint_dtype: str) -> str:
    """The name of the dtype to compute in; on GPUs the checkpoint's, if that has 16 bits."""
    if setting != AUTO:
        return setting
    if device == "cpu":
        return "float32"
    return checkpoint_dtype if checkpoint_dtype in HALVES else HALVES[0]


def free_host_memory() -> int | None:
    """Bytes that this process may still take: of the machine, and of a container with a limit. None
    where the system does not say.
    """
    try:
        free = 1024 * _numbers(Path("/proc/meminfo"))["MemAvailable"]
    except (OSError, KeyError):
        return None
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        # Files that were read are dropped where memory is needed.
        files = _numbers(CGROUP / "memory.stat")["file"]
    except (OSError, KeyError, ValueError):
        return free
    return min(free, limit - used + files)


def _numbers(file: Path) -> dict[str, int]:
    """Of lines of a name and a number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of integers on `device`, int64; work that is launched later sees it."""
    tensor = torch.from_numpy(array.astype(np.int64))
    if device.type == "cuda":
        # Only copies from pinned memory are asynchronous.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of several tensors from a device to the host; starts at once.

    Element sizes must not increase from one tensor to the next.
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
        """Wait for the copy; returns the tensors on the host, on a CPU the tensors themselves."""
        if self._copied is None:
            return list(self._tensors)
        self._copied.synchronize()
        return unpack(self._host, self._tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, concatenated, uint8 [bytes]."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into `packed` with the shapes and dtypes of `like`."""
    parts = packed.split([tensor.nbytes for tensor in like])
    return [
        part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)
    ]
