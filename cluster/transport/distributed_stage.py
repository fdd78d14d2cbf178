"""The worker's side of the distributed transport.

What a stage hands on goes out once it is there: in order, and beside the stage where that helps.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...core.errors import DeviceLost, ProtocolError, StageError, StageLost
from ...core.steps import StepInput, StepOutput
from ...models.device import HostCopy
from .hidden_link import Backend, HiddenLink, open_group, serve_store
from .messages import (
    HEARTBEAT,
    HEARTBEAT_S,
    FrameSender,
    StepReader,
    encode_result,
    receive_frame,
)
from .stage_spec import Spans, StageRunner, StageSpec, end_process, launch_stage, run_traced

if TYPE_CHECKING:
    from ...models.stage.stage import PendingOutput

Delivery = Callable[[], None]


class Deliveries:
    """Does one delivery after the other.

    apart  in a thread of its own: a stage whose device computes by itself launches its next step
           while the last one's results are on their way. Otherwise at once, which is faster where
           there is nothing to wait for.

    In that thread `on_end` is called once when a neighbour or the coordinator is gone; what is left
    then is dropped. Without the thread, `add` raises instead.
    """

    def __init__(self, on_end: Callable[[Exception], None], *, apart: bool) -> None:
        self._on_end = on_end
        self._waiting: queue.SimpleQueue[Delivery | None] | None = None
        if apart:
            self._waiting = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def add(self, delivery: Delivery) -> None:
        """Do it now, or when those before it are done."""
        if self._waiting is None:
            delivery()
        else:
            self._waiting.put(delivery)

    def close(self) -> None:
        """Wait for what was added; nothing may be added any more."""
        if self._waiting is not None:
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        assert self._waiting is not None
        while (delivery := self._waiting.get()) is not None:
            try:
                delivery()
            except (StageLost, ConnectionError) as error:
                self._on_end(error)
                return


logger = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Where a stage finds the others.

    own_host                address of the stage's own node, where the other stages reach it
    backend                 of hidden states
    store_host, store_port  of the rendezvous of the stages
    meeting_s               seconds that a neighbour may take to come
    """

    own_host: str
    num_stages: int
    backend: Backend
    store_host: str
    store_port: int
    meeting_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """Where a stage finds the coordinator, which sends steps and takes answers.

    secret  first bytes that the stage sends there, followed by its index as one byte
    """

    host: str
    port: int
    secret: bytes
    max_in_flight: int


class DistributedStage:
    """Takes steps from a socket and hidden states from the stage before.

    Every stage gets every step straight from the coordinator, so it knows how many rows come
    before they come. Where a stage fails on a step it tells the coordinator and sends zeros on, so
    that those behind it never wait. A stage whose device computes apart launches its next step
    while the results of the last are on their way. One whose device failed for good tells the
    coordinator and ends its process.
    """

    def __init__(self, index: int, spec: StageSpec) -> None:
        self._index = index
        self._spec = spec
        self._dtype = getattr(torch, spec.dtype)
        self._store: TCPStore | None = None
        self._hidden_link: HiddenLink | None = None
        self._connection: socket.socket | None = None
        self._is_cut_off = False

    def cut_off(self) -> None:
        """End `serve` from another thread, as if the coordinator had closed the connection."""
        self._is_cut_off = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # closed in this moment
                connection.shutdown(socket.SHUT_RDWR)

    def open_store(self, host: str) -> int:
        """Serve the rendezvous on this address only; returns the port."""
        self._store, port = serve_store(host, RENDEZVOUS_TIMEOUT)
        return port

    def meet(self, row: StageRow) -> None:
        """Connect with the stages before and behind, which do so at the same time.

        Raises `StageLost` where one does not come.
        """
        self._row = row
        if row.num_stages == 1:
            return
        self._store = self._store or TCPStore(
            row.store_host, row.store_port, is_master=False, timeout=RENDEZVOUS_TIMEOUT
        )
        rank = (self._index, row.num_stages)
        group = open_group(row.backend, self._store, *rank, row.own_host)
        device = torch.device(self._spec.device)
        self._hidden_link = HiddenLink(group, *rank, device, row.backend)
        self._hidden_link.try_out(timedelta(seconds=row.meeting_s))

    def serve(self, stage: StageRunner, link: StageLink) -> None:
        """Run steps until the coordinator closes the connection or a neighbour is lost.

        After `meet`.
        """
        self._link = link
        with socket.create_connection((link.host, link.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A coordinator whose machine is gone says nothing more.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._connection = connection
            connection.sendall(link.secret + bytes([self._index]))
            self._answers = FrameSender(connection)
            ended = threading.Event()
            threading.Thread(target=_beat, args=(self._answers, ended), daemon=True).start()
            self._deliveries = Deliveries(self._end, apart=self._spec.computes_apart)
            reader = StepReader()
            try:
                while not self._is_cut_off:
                    self._step(stage, *reader.read(receive_frame(connection)))
            except ProtocolError as error:
                reason = f"stage {self._index} was sent what is no step: {error}"
                self._end(StageLost(reason), "bad_message")
            except (StageLost, EOFError, ConnectionError) as error:
                self._end(error)
            finally:
                ended.set()
                self._deliveries.close()
                self._leave()

    @property
    def _is_last(self) -> bool:
        return self._index == self._row.num_stages - 1

    def _leave(self) -> None:
        """Give sockets and threads of the group back now, not when garbage is collected.

        A process whose NCCL lost a neighbour is replaced as a whole.
        """
        self._store = None
        if self._row.backend == "gloo":
            self._hidden_link = None

    def _end(self, error: Exception, event: str = "neighbour_lost") -> None:
        if not isinstance(error, StageLost):
            logger.info("event=link_closed stage=%d", self._index)
            return
        is_device = isinstance(error, DeviceLost)
        event = "device_lost" if is_device else event
        # The coordinator tells of a neighbour, once for all stages.
        level = logging.WARNING if is_device else logging.INFO
        logger.log(level, "event=%s stage=%d reason=%r", event, self._index, str(error))
        with contextlib.suppress(ConnectionError):  # the coordinator gave up before
            self._answers.send(encode_result(0, error))
        if is_device:
            end_process()

    def _step(self, stage: StageRunner, sequence: int, step: StepInput) -> None:
        result, spans = self._launch(stage, step)
        if isinstance(result, torch.Tensor):
            self._hand_on(result, spans)
            return
        self._deliveries.add(lambda: self._answers.send(encode_result(sequence, _settled(result))))
        if not self._is_last:
            self._hand_on(torch.zeros(len(step.token_ids), self._spec.output_size), spans)

    def _launch(
        self, stage: StageRunner, step: StepInput
    ) -> tuple[torch.Tensor | PendingOutput | StageError, Spans]:
        """What the stage gave, and the spans of a traced step."""
        num_rows = len(step.token_ids)
        hidden, spans = None, ()
        if self._index:
            assert self._hidden_link is not None
            num_spans = self._index if step.is_traced else 0
            size = (num_rows, self._spec.input_size)
            hidden, spans = self._hidden_link.receive(*size, self._dtype, num_spans)
        try:
            if step.is_traced:
                result, spans = run_traced(self._index, stage, step, hidden, spans)
            else:
                result = launch_stage(self._index, stage, step, hidden)
        except StageError as error:
            return error, ((0.0, 0.0),) * (self._index + 1) if step.is_traced else ()
        return self._checked(result, num_rows), spans

    def _checked(
        self, result: torch.Tensor | StepOutput | PendingOutput, num_rows: int
    ) -> torch.Tensor | PendingOutput | StageError:
        if isinstance(result, StepOutput):
            return lambda: result
        expected = (num_rows, self._spec.output_size)
        if not self._is_last and (not isinstance(result, torch.Tensor) or result.shape != expected):
            return StageError(f"stage {self._index} gave no hidden states of shape {expected}")
        return result

    def _hand_on(self, hidden: torch.Tensor, spans: Spans) -> None:
        """Start to send; this stage goes on with its next step while the tensors are under way."""
        link, most = self._hidden_link, self._link.max_in_flight
        assert link is not None
        hidden = hidden.to(self._dtype).contiguous()
        if self._row.backend == "nccl":
            link.send(hidden.to(link.device), spans, most)
        else:
            copy = HostCopy([hidden])
            self._deliveries.add(lambda: link.send(self._arrived(copy), spans, most))

    def _arrived(self, copy: HostCopy) -> torch.Tensor:
        try:
            (hidden,) = copy.wait()
        except RuntimeError as error:
            # A device tells of what failed when it is waited for, and is of no use afterwards.
            raise DeviceLost(f"the device of stage {self._index} failed: {error}") from error
        return hidden


def _beat(answers: FrameSender, ended: threading.Event) -> None:
    """Tell the coordinator that this process runs, whatever the stage is doing."""
    while not ended.wait(HEARTBEAT_S):
        try:
            answers.send(HEARTBEAT)
        except OSError:  # the connection is closed
            return


def _settled(result: PendingOutput | StageError) -> StepOutput | StageError:
    if isinstance(result, StageError):
        return result
    try:
        return result()
    except StageError as error:
        return error
