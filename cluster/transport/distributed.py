"""The coordinator's side of stages in other processes: steps over sockets, hidden states between
stages over a process group of torch.distributed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from ...core.errors import ProtocolError, StageLost
from ...core.steps import StepInput
from .distributed_stage import StageLink, StageRow
from .hidden_link import Backend
from .messages import (
    HEARTBEAT,
    HEARTBEAT_S,
    FrameBuffer,
    StepWriter,
    decode_result,
    encode_frame,
    new_epoch,
)
from .stage_spec import InFlightSteps
from .stage_worker import StagePlace

LOOPBACK = "127.0.0.1"
SECRET_BYTES = 32
# A neighbour that comes at all comes within this. And there are two rounds, one behind the other,
# which end before the time for the start does.
MEETING_S, ROUNDS = 60.0, 2
# A stage from which nothing comes for so many heartbeats hangs.
MISSED_HEARTBEATS = 3

Join = Callable[[int, "_StageConnection"], None]


class DistributedTransport:
    """Carries steps to the stages and answers back, and connects the stages with one another.

    Every stage keeps one connection, whose end tells of its death, and silence of a process that
    hangs. Owned by a `RayPipeline`, which starts and kills the actors (`StageWorker`).

    places   of the stages, in order
    backend  of hidden states between them
    """

    def __init__(self, places: Sequence[StagePlace], backend: Backend, max_in_flight: int) -> None:
        nodes = {ray.get_runtime_context().get_node_id(), *(place.node for place in places)}
        alone = len(nodes) == 1
        self._host = LOOPBACK if alone else ray.util.get_node_ip_address()
        self._stage_hosts = [LOOPBACK if alone else place.address for place in places]
        self._backend: Backend = backend
        self._max_in_flight = max_in_flight
        self._server: asyncio.Server | None = None
        self._connections: dict[int, _StageConnection] = {}
        self._listening: asyncio.TimerHandle | None = None
        self._writer = StepWriter(new_epoch())

    @property
    def leaves_stages_idle(self) -> bool:
        """Whether stages that live are free for another run once this side is closed: with NCCL a
        device waits for a lost neighbour for ever.
        """
        return self._backend == "gloo"

    async def meet(self, stages: Sequence[ActorHandle], seconds: float) -> None:
        """Connect neighbours, before they load what fills their memory; within that time.

        Raises `StageLost`, or a `RayTaskError` of it, that names two that do not reach one another.
        """
        opening: Any = stages[0].open_store.remote(self._stage_hosts[0])
        store_port: int = await opening
        meetings: list[Any] = [
            stage.meet.remote(
                StageRow(
                    own_host=own_host,
                    num_stages=len(stages),
                    backend=self._backend,
                    store_host=self._stage_hosts[0],
                    store_port=store_port,
                    meeting_s=min(MEETING_S, seconds / (ROUNDS + 1)),
                )
            )
            for stage, own_host in zip(stages, self._stage_hosts, strict=True)
        ]
        await asyncio.gather(*meetings)

    async def open(self, stages: Sequence[ActorHandle], steps: InFlightSteps) -> None:
        """Connect built stages. From then on `steps` receives answers and losses."""
        secret = secrets.token_bytes(SECRET_BYTES)
        joined = asyncio.Event()

        def join(index: int, connection: _StageConnection) -> None:
            self._connections[index] = connection
            if len(self._connections) == len(stages):
                joined.set()

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _StageConnection(secret, len(stages), join, steps), self._host, 0
        )
        port = self._server.sockets[0].getsockname()[1]
        link = StageLink(
            host=self._host, port=port, secret=secret, max_in_flight=self._max_in_flight
        )
        serving: list[Any] = [stage.serve.remote(link) for stage in stages]
        await _joined_or_failed(joined, serving)
        self._server.close()
        self._listen()

    def _listen(self) -> None:
        """Count heartbeats that did not come, once a `HEARTBEAT_S`.

        A pause of this process is no stage's fault: however long it was, it counts as one.
        """
        for connection in self._connections.values():
            connection.count_heartbeat()
        loop = asyncio.get_running_loop()
        self._listening = loop.call_later(HEARTBEAT_S, self._listen)

    def send(self, sequence: int, step: StepInput) -> None:
        """Send a step to the stages; does not wait for them. A failure goes to `steps`.

        Raises `ProtocolError`, and sends nothing, where the step has no encoding.
        """
        payloads = self._writer.write(sequence, step)
        rows, whole = encode_frame(payloads.rows), encode_frame(payloads.whole)
        last = len(self._connections) - 1
        for index, connection in self._connections.items():
            connection.write(whole if index == last else rows)

    def close(self) -> None:
        """Free everything on this side."""
        if self._server is not None:
            self._server.close()
        if self._listening is not None:
            self._listening.cancel()
        for connection in self._connections.values():
            connection.abort()
        self._connections.clear()


async def _joined_or_failed(joined: asyncio.Event, serving: Sequence[Awaitable[None]]) -> None:
    """Wait until all stages are there. Raises `StageLost` as soon as one gives up."""
    joining = asyncio.ensure_future(joined.wait())
    ends = [asyncio.ensure_future(end) for end in serving]
    try:
        await asyncio.wait([joining, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            index = next(index for index, end in enumerate(ends) if end.done())
            raise StageLost(f"stage {index} could not join: {ends[index].exception()}")
    finally:
        # The stages go on serving; their end is not awaited here.
        for task in (joining, *ends):
            task.cancel()


class _StageConnection(asyncio.Protocol):
    """One stage's messages: first the secret and its index, then answers and heartbeats."""

    def __init__(self, secret: bytes, num_stages: int, join: Join, steps: InFlightSteps) -> None:
        self._secret = secret
        self._num_stages = num_stages
        self._join = join
        self._steps = steps
        self._greeting = b""
        self._frames = FrameBuffer()
        self._index: int | None = None
        self._num_missed = 0

    def write(self, frame: bytes) -> None:
        """Send a frame; does not wait."""
        self._transport.write(frame)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def count_heartbeat(self) -> None:
        """A heartbeat's time has passed. The stage is lost if it is one of several without any."""
        self._num_missed += 1
        if self._num_missed > MISSED_HEARTBEATS:
            seconds = MISSED_HEARTBEATS * HEARTBEAT_S
            self._steps.lose(f"stage {self._index} was silent for {seconds:.0f} s: it hangs")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance: Ray's async actors run uvloop, whose transports are of no asyncio class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._index is None:
            data = self._greeted(data)
        self._num_missed = 0
        try:
            for message in self._frames.feed(data):
                if message != HEARTBEAT:
                    self._steps.answer(*decode_result(message))
        except ProtocolError as error:
            self._steps.lose(f"stage {self._index} sent what is no answer: {error}")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._index is not None:
            self._steps.lose(f"stage {self._index} closed its connection: {exc or 'it is dead'}")

    def _greeted(self, data: bytes) -> bytes:
        """Take the greeting off; nothing is decoded before it is known to be right."""
        self._greeting += data
        size = len(self._secret) + 1
        if len(self._greeting) < size:
            return b""
        greeting, rest = self._greeting[:size], self._greeting[size:]
        if not hmac.compare_digest(greeting[:-1], self._secret) or greeting[-1] >= self._num_stages:
            self._transport.abort()
            return b""
        self._index = greeting[-1]
        self._join(self._index, self)
        return rest
