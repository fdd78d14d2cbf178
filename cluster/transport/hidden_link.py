"""Hidden states from the stage before and to the stage behind, over a process group."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch.distributed import (
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from ...core.errors import StageLost
from .stage_spec import Spans

# gloo: through the memory of the hosts. nccl: from GPU to GPU.
Backend = Literal["gloo", "nccl"]

# A stage waits for the one before it as long as that computes; a death breaks the wait at once.
LINK_TIMEOUT = timedelta(hours=1)
TRIAL_PAUSE_S = 0.001
HINTS: dict[Backend, str] = {
    "gloo": "",
    "nccl": " (NCCL_DEBUG=INFO says more; stage_transport: distributed does without NCCL)",
}


class SideStream:
    """A stream of a device beside the current one; where the device is a CPU, there is none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside(self) -> AbstractContextManager[Any]:
        """What is begun within waits for nothing that the current stream was given."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def hand_over(self, *tensors: torch.Tensor) -> None:
        """The current stream uses these from now on: their memory is not another's before."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


class HiddenLink:
    """One stage's end; the stages before and behind it are its neighbours in the group.

    Hidden states follow one another in order, those of a traced step with its spans behind them;
    they need no header.

    With `gloo` tensors are sent and received on the host. With `nccl` they stay on their devices,
    and nothing here waits for a device, except for spans.
    """

    def __init__(
        self, group: Any, index: int, num_stages: int, device: torch.device, backend: Backend
    ) -> None:
        """`group`: of `open_group`, whose stubs know neither `send` nor `recv`."""
        self._group = group
        self._index = index
        self._is_last = index == num_stages - 1
        self._device = device if backend == "nccl" else torch.device("cpu")
        # Pinned, so that copies to the device of the stage wait for nothing.
        self._pinned = backend == "gloo" and device.type == "cuda"
        self._backend: Backend = backend
        self._receiving = SideStream(self._device)
        self._sending: deque[list[tuple[Work, torch.Tensor]]] = deque()

    @property
    def device(self) -> torch.device:
        """Where the tensors are that are sent and received."""
        return self._device

    def try_out(self, timeout: timedelta) -> None:
        """Send a number to every neighbour. Raises `StageLost` if one does not come in that time.

        NCCL connects neighbours only now, which takes seconds a pair: all pairs that begin with a
        stage of even index at once, then all others. What it takes of a device's memory it takes
        then, too.
        """
        number = torch.zeros(1, device=self._device)

        def from_before() -> None:
            if self._index:
                before = self._index - 1
                self._try(lambda: self._group.recv([number], before, 0), before, timeout)

        def to_behind() -> None:
            if not self._is_last:
                behind = self._index + 1
                self._try(lambda: self._group.send([number], behind, 0), behind, timeout)

        is_odd = self._index % 2 == 1
        for meet in (from_before, to_behind) if is_odd else (to_behind, from_before):
            meet()

    def receive(
        self, num_rows: int, hidden_size: int, dtype: torch.dtype, num_spans: int
    ) -> tuple[torch.Tensor, Spans]:
        """Hidden states [num_rows, hidden_size], and the spans of the stages before.

        Raises `StageLost`.
        """
        like = {"device": self._device, "pin_memory": self._pinned}
        # NCCL begins behind what the current stream was given before: on one of its own the tensors
        # come while the device computes the step before.
        with self._receiving.beside():
            hidden = torch.empty(num_rows, hidden_size, dtype=dtype, **like)
            spans = torch.empty(num_spans, 2, dtype=torch.float64, **like)
        for tensor in (hidden, spans):
            if len(tensor):
                with self._receiving.beside():
                    work = self._group.recv([tensor], self._index - 1, 0)
                self._wait(work, self._index - 1)
        self._receiving.hand_over(hidden, spans)
        return hidden, tuple((begin, end) for begin, end in spans.tolist()) if num_spans else ()

    def send(self, hidden: torch.Tensor, spans: Spans, max_under_way: int) -> None:
        """Begin to send; the tensors are kept while they may be under way. Raises `StageLost`.

        Those of steps older than `max_under_way` have arrived, so this never waits long.
        """
        tensors = [hidden]
        if spans:
            tensors.append(torch.tensor(spans, dtype=torch.float64, device=self._device))
        behind = self._index + 1
        self._sending.append(
            [(self._group.send([part], behind, 0), part) for part in tensors if len(part)]
        )
        while len(self._sending) > max_under_way:
            for work, _ in self._sending.popleft():
                self._wait(work, behind)

    def _wait(self, work: Work, neighbour: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:  # the groups have no class of their own for a lost peer
            raise StageLost(f"stage {neighbour} is out of reach of stage {self._index}") from error

    def _try(self, begin: Callable[[], Work], neighbour: int, timeout: timedelta) -> None:
        ends: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

        def meet() -> None:
            try:
                work = begin()
                if self._backend == "nccl":
                    _wait_on_host(work, timeout)
                else:
                    work.wait(timeout)
                ends.put(None)
            except RuntimeError as error:
                ends.put(error)

        # NCCL connects within `begin`, and has no limit of time there.
        threading.Thread(target=meet, name="draftline-meeting", daemon=True).start()
        try:
            error = ends.get(timeout=timeout.total_seconds())
        except queue.Empty:
            error = _nothing_came(timeout)
        if error is not None:
            raise StageLost(
                f"stage {self._index} does not reach stage {neighbour} by {self._backend}: "
                f"{error}{HINTS[self._backend]}"
            ) from error


def _wait_on_host(work: Work, timeout: timedelta) -> None:
    """Wait in this thread, where NCCL's own `wait` would let the device. Raises `RuntimeError`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise _nothing_came(timeout)
        time.sleep(TRIAL_PAUSE_S)


def _nothing_came(timeout: timedelta) -> RuntimeError:
    return RuntimeError(f"nothing came within {timeout.total_seconds():g} s")


def serve_store(host: str, timeout: timedelta) -> tuple[TCPStore, int]:
    """The rendezvous of a group, served on this address only, and its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def open_group(
    backend: Backend,
    store: TCPStore,
    index: int,
    num_stages: int,
    own_host: str,
    *,
    timeout: timedelta = LINK_TIMEOUT,
) -> Any:
    """The process group of all stages; waits for them."""
    if backend == "nccl":
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout  # noqa: SLF001
        return nccl(store, index, num_stages, options)
    gloo: Any = ProcessGroupGloo
    # Without a given device gloo takes the address that the host name resolves to.
    options = gloo._Options()  # noqa: SLF001
    options._devices = [gloo.create_device(hostname=own_host)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return gloo(store, index, num_stages, options)
