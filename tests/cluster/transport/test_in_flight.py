"""Bookkeeping of unanswered steps, and the messages between coordinator and stages."""

from __future__ import annotations

import asyncio
import gc
from unittest.mock import Mock

import pytest
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.transport.distributed import (
    MISSED_HEARTBEATS,
    _joined_or_failed,
    _StageConnection,
)
from draftline.cluster.transport.messages import (
    HEARTBEAT,
    LENGTH,
    MAX_FRAME_BYTES,
    FrameBuffer,
    encode_frame,
    encode_result,
)
from draftline.cluster.transport.stage_spec import InFlightSteps
from draftline.core.errors import ProtocolError, StageError, StageLost
from draftline.core.steps import LogProbOutput, StepOutput
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_stage import fake_specs, fake_step

SECRET = b"s" * 32


def output(step_id: int) -> StepOutput:
    step = fake_step(step_id)
    return StepOutput(step_id, step.token_ids, step.moves, LogProbOutput(step.sampling.temperature))


async def test_the_first_answer_counts() -> None:
    steps = InFlightSteps(2)
    sequence, future = steps.add()
    steps.answer(sequence, StageError("stage 0 failed"))
    steps.answer(sequence, output(1))
    with pytest.raises(StageError, match="stage 0 failed"):
        await future


async def test_the_first_loss_counts() -> None:
    steps = InFlightSteps(2)
    _, future = steps.add()
    steps.lose("stage 1 is dead")
    steps.lose("stage 2 is dead")
    steps.end("the pipeline was closed")
    with pytest.raises(StageLost, match="stage 1"):
        await future
    assert str(steps.error()) == "stage 1 is dead"


async def test_asyncio_does_not_complain_of_lost_steps_nobody_waits_for() -> None:
    told = Mock()
    asyncio.get_running_loop().set_exception_handler(told)
    steps = InFlightSteps(2)
    _, future = steps.add()
    steps.lose("stage 1 is dead")
    del future
    gc.collect()
    told.assert_not_called()


async def test_a_local_pipeline_must_be_open() -> None:
    pipeline = LocalPipeline([spec.build() for spec in fake_specs(2)])
    with pytest.raises(StageLost, match="not open"):
        await pipeline.submit(fake_step(0))
    await pipeline.start()
    assert (await pipeline.submit(fake_step(5))).step_id == 5
    await pipeline.close()
    with pytest.raises(StageLost, match="not open"):
        await pipeline.submit(fake_step(0))


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 50))
def test_frames_survive_any_cut(values: list[bytes], chunk: int) -> None:
    stream = b"".join(map(encode_frame, values))
    buffer = FrameBuffer()
    received: list[bytes] = []
    for start in range(0, len(stream), chunk):
        received.extend(buffer.feed(stream[start : start + chunk]))
    assert received == values


def test_a_frame_over_the_limit_is_refused() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        list(FrameBuffer().feed(LENGTH.pack(MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize("greeting", [b"x" * 32 + b"\0", SECRET + b"\2"])
async def test_a_stranger_is_cut_off_before_anything_is_decoded(greeting: bytes) -> None:
    join, transport = Mock(), Mock(spec=asyncio.Transport)
    steps = InFlightSteps(1)
    connection = _StageConnection(SECRET, 2, join, steps)
    connection.connection_made(transport)
    connection.data_received(greeting + encode_frame(encode_result(0, StageLost("not yours"))))
    connection.connection_lost(None)
    transport.abort.assert_called_once()
    join.assert_not_called()
    assert not steps.lost.is_set()


async def test_a_greeting_may_come_in_pieces() -> None:
    join, transport = Mock(), Mock(spec=asyncio.Transport)
    steps = InFlightSteps(1)
    sequence, future = steps.add()
    connection = _StageConnection(SECRET, 2, join, steps)
    connection.connection_made(transport)
    for byte in SECRET + b"\1" + encode_frame(encode_result(sequence, output(9))):
        connection.data_received(bytes([byte]))
    join.assert_called_once_with(1, connection)
    assert (await future).step_id == 9


async def test_a_silent_stage_is_lost_and_one_that_computes_long_is_not() -> None:
    steps = InFlightSteps(1)
    _, future = steps.add()
    connection = _StageConnection(SECRET, 2, Mock(), steps)
    connection.connection_made(Mock(spec=asyncio.Transport))
    connection.data_received(SECRET + b"\1")
    for _ in range(3 * MISSED_HEARTBEATS):
        connection.count_heartbeat()
        connection.data_received(encode_frame(HEARTBEAT))
    for _ in range(MISSED_HEARTBEATS):
        connection.count_heartbeat()
    assert not steps.lost.is_set()
    connection.count_heartbeat()
    with pytest.raises(StageLost, match="stage 1 was silent for 3 s: it hangs"):
        await future


async def _serve(end: asyncio.Future[None]) -> None:
    await asyncio.shield(end)


async def test_a_stage_that_cannot_join_ends_the_wait() -> None:
    ends = [asyncio.get_running_loop().create_future() for _ in range(3)]
    ends[1].set_exception(OSError("no route"))
    with pytest.raises(StageLost, match="stage 1 could not join: no route"):
        await _joined_or_failed(asyncio.Event(), [_serve(end) for end in ends])
    assert not ends[0].done()


async def test_stages_that_joined_serve_on() -> None:
    joined, end = asyncio.Event(), asyncio.get_running_loop().create_future()
    joined.set()
    await _joined_or_failed(joined, [_serve(end)])
    assert not end.done()
