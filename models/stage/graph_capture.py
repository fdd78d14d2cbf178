"""Work that is captured once and replayed: CUDA graphs, and a protocol for tests' stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Capture(Protocol):
    """Makes work replayable. The work reads and writes tensors that stay where they are."""

    def __call__(self, work: Work) -> Work:
        """What does the work again, without Python; `work` is done at least once meanwhile.

        What `work` leaves in memory that it allocated is valid until the next replay of any.
        """
        ...


class CudaCapture:
    """Captures CUDA graphs on a stream of its own; all share the memory between their layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Capture `work` as a CUDA graph after one run of it; the function that replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Kernels are compiled and libraries make their workspaces in a first run: a capture
            # allows neither.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()
            torch.cuda.current_stream().wait_stream(self._stream)
            # Other threads, of drafters say, may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay
