"""Messages between coordinator and stages, as msgpack: steps, answers, failures.

Steps are sent as deltas (`step_codec/`), and fields as `typed_messages.py` has them. On a
connection the length precedes each message. `distributed.py` first checks the secret of the run,
and closes connections without it.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from ...core.errors import DeviceLost, ProtocolError, StageError, StageLost
from ...core.steps import LogitEdits, Penalties, StepInput, StepOutput, prompt_step
from .stage_spec import StageResult
from .step_codec.decoder import StepDecoder
from .step_codec.encoder import StepEncoder
from .step_codec.step_delta import ChoiceDelta, RowsDelta, StepDelta
from .typed_messages import MessageDecoder, encode

LENGTH = struct.Struct("!Q")
# An empty message: a stage sends one each `HEARTBEAT_S`, also while it computes.
HEARTBEAT = b""
HEARTBEAT_S = 1.0
MAX_FRAME_BYTES = 1 << 30
EPOCH_BITS = 62
Kind = Literal["step", "stage", "device"]
ERRORS: dict[Kind, type[StageError | StageLost]] = {
    "step": StageError,
    "stage": StageLost,
    "device": DeviceLost,
}
KINDS: dict[type[StageError | StageLost], Kind] = {error: kind for kind, error in ERRORS.items()}


class StepMessage(NamedTuple):
    """To a stage: a step, by its number in the pipeline's run, as a `StepDelta`.

    Only the last stage receives `choice`.
    """

    sequence: int
    epoch: int
    serial: int
    rows: RowsDelta
    choice: ChoiceDelta | None


class StepPayloads(NamedTuple):
    """A step for the stages before the last, and for the last."""

    rows: bytes
    whole: bytes


class Failure(NamedTuple):
    """An error of a stage: what it ends, and its text."""

    kind: Kind
    reason: str


class ResultMessage(NamedTuple):
    """From a stage: the answer to step `sequence`, or its failure."""

    sequence: int
    answer: StepOutput | Failure


def new_epoch() -> int:
    """A random id of a run of the stages."""
    return secrets.randbits(EPOCH_BITS)


class StepWriter:
    """Makes the messages of one run of the stages. `epoch` names the run."""

    def __init__(self, epoch: int) -> None:
        self._encoder = StepEncoder(epoch)

    def write(self, sequence: int, step: StepInput) -> StepPayloads:
        """The next step, against those before it: every one that is written must be sent.

        Raises `ProtocolError` where a value of it has no encoding.
        """
        try:
            delta = self._encoder.encode(step)
            head = (sequence, delta.epoch, delta.serial)
            rows = msgspec.Raw(encode(delta.rows))
            whole = encode((*head, rows, delta.choice))
            return StepPayloads(encode((*head, rows, None)), whole)
        except (TypeError, OverflowError) as error:
            self._encoder.forget()
            raise ProtocolError(f"step {step.step_id} has no encoding: {error}") from error


class StepReader:
    """A stage's end of the messages, of one run after the other."""

    def __init__(self) -> None:
        self._decoder = StepDecoder()

    def read(self, data: bytes | bytearray) -> tuple[int, StepInput]:
        """The number of a step in the run, and the step.

        Raises `ProtocolError`, which names the field, for what is no message or not the next one.
        """
        sequence, epoch, serial, rows, choice = _steps.decode(data)
        return sequence, self._decoder.decode(StepDelta(epoch, serial, rows, choice))


def load_loops() -> None:
    """Compile the loops of both ends, or load them: no step is to wait for that."""
    step = prompt_step(2, 1)
    ids, zeros = step.logits_rows, np.zeros(2, dtype=np.float32)
    penalties = Penalties(ids, ids, ids > 0, ids, ids, 1.0, 0.5, 0.5)
    mask = np.ones((2, 2), dtype=np.uint32)
    step = replace(step, edits=(LogitEdits(0, 2, ids, zeros, penalties, mask),))
    writer, reader = StepWriter(0), StepReader()
    for sequence in range(2):
        reader.read(writer.write(sequence, step).whole)


def encode_result(sequence: int, answer: StageResult) -> bytes:
    """A stage's answer to a step.

    An output whose values have no encoding goes as a `StageError`, which ends that step alone.
    """
    if isinstance(answer, StepOutput):
        try:
            return encode(ResultMessage(sequence, answer))
        except (TypeError, OverflowError) as error:
            answer = StageError(f"the answer to step {answer.step_id} has no encoding: {error}")
    kind = KINDS[type(answer)]
    return encode(ResultMessage(sequence, Failure(kind, str(answer))))


def decode_result(data: bytes | bytearray) -> tuple[int, StageResult]:
    """What `encode_result` was given, errors of the same class and text.

    Raises `ProtocolError`, which names the field, for other bytes.
    """
    sequence, answer = _answers.decode(data)
    if isinstance(answer, Failure):
        return sequence, ERRORS[answer.kind](answer.reason)
    return sequence, answer


_steps = MessageDecoder(StepMessage, "not a message between stages")
_answers = MessageDecoder(ResultMessage, "not a message between stages")


def encode_frame(message: bytes) -> bytes:
    """One message with its length."""
    return LENGTH.pack(len(message)) + message


class FrameBuffer:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with `data`. Raises `ProtocolError` above the limit."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + _checked_length(self._bytes)
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield message


class FrameSender:
    """Sends messages whole, whichever thread has one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """One message. Raises `ConnectionError`."""
        frame = encode_frame(message)
        with self._lock:
            self._connection.sendall(frame)


def receive_frame(connection: socket.socket) -> bytearray:
    """Wait for one message.

    Raises `EOFError` when the other side has closed, `ProtocolError` above the limit.
    """
    length = _checked_length(_receive(connection, LENGTH.size))
    return _receive(connection, length)


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other side closed the connection")
        view = view[count:]
    return data


def _checked_length(head: bytearray) -> int:
    (length,) = LENGTH.unpack_from(head)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length
