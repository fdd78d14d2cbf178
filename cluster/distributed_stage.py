"""The worker's side of the distributed transport."""

from __future__ import annotations

import logging
import socket
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from ..core.errors import StageError, StageLost
from ..core.types import StepInput, StepOutput
from .frames import encode_frame, receive_frame
from .pipeline import StageRunner, StageSpec, run_stage
from .stage_spans import Spans, run_traced

logger = logging.getLogger(__name__)

# A stage waits for the one before it as long as that computes; a death breaks the wait at once.
LINK_TIMEOUT = timedelta(hours=1)
RENDEZVOUS_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """Where a stage finds the coordinator and the other stages.

    host, port    of the coordinator, which sends steps and takes answers
    secret        first bytes that the stage sends there, followed by its index as one byte
    own_host      address of the stage's own node, where the other stages reach it
    store_host, store_port  of the rendezvous of the stages
    """

    host: str
    port: int
    secret: bytes
    own_host: str
    num_stages: int
    max_in_flight: int
    store_host: str
    store_port: int


class DistributedStage:
    """Takes steps from a socket and hidden states from a process group of all stages.

    Every stage gets every step straight from the coordinator, so it knows how many rows come
    before they come. Hidden states follow one another in order, those of a traced step with its
    spans behind them; they need no header. Where a stage fails on a step it tells the coordinator
    and sends zeros on, so that those behind it never wait.
    """

    def __init__(self, index: int, spec: StageSpec) -> None:
        self._index = index
        self._spec = spec
        self._dtype = getattr(torch, spec.dtype)
        self._store: TCPStore | None = None
        self._group: Any = None  # ProcessGroupGloo, whose stubs know neither `send` nor `recv`
        self._max_in_flight = 1
        self._sending: deque[list[tuple[Work, torch.Tensor]]] = deque()

    def open_store(self, host: str) -> int:
        """Serve the rendezvous on this address only; returns the port."""
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=RENDEZVOUS_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    def serve(self, stage: StageRunner, link: StageLink) -> None:
        """Run steps until the coordinator closes the connection or a neighbour is lost."""
        self._max_in_flight = link.max_in_flight
        self._connect(link)
        with socket.create_connection((link.host, link.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(link.secret + bytes([self._index]))
            try:
                while True:
                    self._step(stage, connection, last=self._index == link.num_stages - 1)
            except StageLost as error:
                logger.warning("event=neighbour_lost stage=%d reason=%r", self._index, str(error))
                connection.sendall(encode_frame((0, error)))
            except (EOFError, ConnectionError):
                logger.info("event=link_closed stage=%d", self._index)

    def _step(self, stage: StageRunner, connection: socket.socket, last: bool) -> None:
        sequence, step = receive_frame(connection)
        result, spans = self._run(stage, step, last)
        if isinstance(result, StepOutput | StageError):
            connection.sendall(encode_frame((sequence, result)))
        if not last:
            self._send(result, spans, step)

    def _connect(self, link: StageLink) -> None:
        if link.num_stages == 1:
            return
        store = self._store or TCPStore(
            link.store_host, link.store_port, is_master=False, timeout=RENDEZVOUS_TIMEOUT
        )
        gloo: Any = ProcessGroupGloo
        # Without a device of its own gloo would take whatever address the host name resolves to.
        options = gloo._Options()  # noqa: SLF001
        options._devices = [gloo.create_device(hostname=link.own_host)]  # noqa: SLF001
        options._timeout = LINK_TIMEOUT  # noqa: SLF001
        self._store = store
        self._group = gloo(store, self._index, link.num_stages, options)

    def _run(
        self, stage: StageRunner, step: StepInput, last: bool
    ) -> tuple[torch.Tensor | StepOutput | StageError, Spans]:
        """What the stage gave, and the spans of a traced step."""
        num_rows = len(step.token_ids)
        hidden, spans = self._receive(step) if self._index else (None, ())
        try:
            if step.is_traced:
                result, spans = run_traced(self._index, stage, step, hidden, spans)
            else:
                result = run_stage(self._index, stage, step, hidden)
        except StageError as error:
            return error, ((0.0, 0.0),) * (self._index + 1)
        expected = (num_rows, self._spec.hidden_size)
        if not last and (not isinstance(result, torch.Tensor) or result.shape != expected):
            message = f"stage {self._index} gave no hidden states of shape {expected}"
            return StageError(message), spans
        return result, spans

    def _receive(self, step: StepInput) -> tuple[torch.Tensor, Spans]:
        hidden = torch.empty(len(step.token_ids), self._spec.hidden_size, dtype=self._dtype)
        spans = torch.empty(self._index if step.is_traced else 0, 2, dtype=torch.float64)
        for tensor in (hidden, spans):
            if len(tensor):
                self._wait(self._group.recv([tensor], self._index - 1, 0), self._index - 1)
        return hidden, tuple((begin, end) for begin, end in spans.tolist())

    def _send(
        self, result: torch.Tensor | StepOutput | StageError, spans: Spans, step: StepInput
    ) -> None:
        """Start to send; this stage goes on with its next step while the tensors are under way."""
        if isinstance(result, torch.Tensor):
            hidden = result.to("cpu", self._dtype).contiguous()
        else:
            hidden = torch.zeros(len(step.token_ids), self._spec.hidden_size, dtype=self._dtype)
        tensors = [hidden, torch.tensor(spans, dtype=torch.float64)] if step.is_traced else [hidden]
        self._sending.append(
            [
                (self._group.send([tensor], self._index + 1, 0), tensor)
                for tensor in tensors
                if len(tensor)
            ]
        )
        # Steps older than `max_in_flight` are answered, so this never waits for the next stage.
        while len(self._sending) > self._max_in_flight:
            for work, _ in self._sending.popleft():
                self._wait(work, self._index + 1)

    def _wait(self, work: Work, neighbour: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:  # gloo has no class of its own for a lost peer
            raise StageLost(f"stage {neighbour} is out of reach of stage {self._index}") from error
