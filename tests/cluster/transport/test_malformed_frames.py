"""Whoever reads what is no message says so and goes on: the stage counts as lost, nothing hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from unittest.mock import Mock

import pytest
from draftline.cluster.pipeline.ray_pipeline import RayPipeline
from draftline.cluster.transport.distributed import _StageConnection
from draftline.cluster.transport.distributed_stage import DistributedStage, StageLink, StageRow
from draftline.cluster.transport.messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    StepWriter,
    decode_result,
    encode_frame,
    encode_result,
    receive_frame,
)
from draftline.cluster.transport.stage_spec import InFlightSteps
from draftline.core.errors import ProtocolError, StageError, StageLost
from draftline.core.steps import LogProbOutput, StepOutput
from support.fakes.fake_stage import fake_specs, fake_step

SECRET = b"s" * 32
TIMEOUT_S = 10.0
WRITER = StepWriter(1)
STEP, SECOND, THIRD = (WRITER.write(number, fake_step(number)).whole for number in range(3))


def _other_run() -> bytes:
    """The second step of another coordinator."""
    writer = StepWriter(2)
    writer.write(0, fake_step(0))
    return writer.write(1, fake_step(1)).whole


MALFORMED = {
    "garbage": encode_frame(b"\xc1garbage"),
    "empty": encode_frame(b""),
    "truncated": encode_frame(STEP[:-5]),
    "too_long": LENGTH.pack(MAX_FRAME_BYTES + 1) + b"\0",
    "lost_message": encode_frame(THIRD),
    "other_run": encode_frame(_other_run()),
    "wrong_way": encode_frame(encode_result(0, StageError("an answer is no step"))),
}


class Coordinator:
    """The coordinator's end of two stages, on loopback."""

    def __init__(self) -> None:
        self.steps = InFlightSteps(2)
        self.joined: asyncio.Queue[int] = asyncio.Queue()

    async def open(self) -> None:
        """Wait for stages."""
        self.server = await asyncio.get_running_loop().create_server(
            lambda: _StageConnection(SECRET, 2, self._join, self.steps), "127.0.0.1", 0
        )

    async def connect(self, index: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stage's connection that has shown the secret."""
        port = self.server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SECRET + bytes([index]))
        return reader, writer

    def _join(self, index: int, _connection: _StageConnection) -> None:
        self.joined.put_nowait(index)


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    await coordinator.open()
    yield coordinator
    coordinator.server.close()


# An empty message from a stage is a heartbeat.
@pytest.mark.net
@pytest.mark.parametrize("kind", [kind for kind in MALFORMED if kind not in {"wrong_way", "empty"}])
async def test_a_stage_that_sends_no_answer_is_lost(coordinator: Coordinator, kind: str) -> None:
    _, future = coordinator.steps.add()
    reader, writer = await coordinator.connect(1)
    writer.write(MALFORMED[kind])
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StageLost, match="stage 1 sent what is no answer"):
            await future
        assert await reader.read() == b"", "the connection is closed"
        # The loop takes what others send.
        _, other = await coordinator.connect(0)
        assert [await coordinator.joined.get() for _ in range(2)] == [1, 0]
    for open_writer in (writer, other):
        open_writer.close()


@pytest.mark.net
async def test_answers_before_a_malformed_one_count(coordinator: Coordinator) -> None:
    (first, answered), (_, lost) = coordinator.steps.add(), coordinator.steps.add()
    step = fake_step(5)
    output = StepOutput(5, step.token_ids, step.moves, LogProbOutput(step.sampling.temperature))
    _, writer = await coordinator.connect(0)
    writer.write(encode_frame(encode_result(first, output)) + MALFORMED["garbage"])
    async with asyncio.timeout(TIMEOUT_S):
        assert (await answered).step_id == 5
        with pytest.raises(StageLost, match="stage 0 sent what is no answer"):
            await lost
    writer.close()


@pytest.fixture
def served() -> Iterator[tuple[socket.socket, threading.Thread]]:
    """The coordinator's end of a pipeline of one stage, and the thread that the stage runs in."""
    (spec,) = fake_specs(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        link = StageLink(host="127.0.0.1", port=port, secret=SECRET, max_in_flight=2)
        stage = DistributedStage(0, spec)
        stage.meet(
            StageRow(
                own_host="127.0.0.1", num_stages=1, backend="gloo", store_host="", store_port=0,
                meeting_s=1.0,
            )
        )  # fmt: skip
        thread = threading.Thread(target=stage.serve, args=(spec.build(), link), daemon=True)
        thread.start()
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(33, socket.MSG_WAITALL) == SECRET + b"\0"
        yield connection, thread
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.net
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_stage_that_is_sent_no_step_says_so_and_ends(
    served: tuple[socket.socket, threading.Thread], kind: str
) -> None:
    connection, thread = served
    connection.sendall(encode_frame(STEP) + MALFORMED[kind])
    assert isinstance(decode_result(receive_frame(connection))[1], StepOutput)
    _, error = decode_result(receive_frame(connection))
    assert isinstance(error, StageLost)
    assert "stage 0 was sent what is no step" in str(error)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "its actor is free for another coordinator"


@pytest.mark.net
def test_a_coordinator_that_dies_within_a_message_ends_the_stage(
    served: tuple[socket.socket, threading.Thread],
) -> None:
    connection, thread = served
    connection.sendall(encode_frame(STEP)[:-3])
    connection.shutdown(socket.SHUT_WR)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert connection.recv(1) == b""


async def test_a_step_that_cannot_be_sent_ends_alone() -> None:
    pipeline = RayPipeline(fake_specs(1), Mock())
    pipeline._open = True
    pipeline._transport = Mock(send=Mock(side_effect=ProtocolError("step 3 has no encoding")))
    for _ in range(2 * pipeline.max_in_flight):
        with pytest.raises(StageError, match="step 3 has no encoding"):
            await pipeline.submit(fake_step(3))
