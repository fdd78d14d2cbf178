"""Messages between the engine's process and the API's processes, and a side of their connection.

A frame is its length and a list of messages, as msgpack: all that one side has sent since its last
frame. Decoding makes these values and nothing else, and checks every field against its annotation.
Messages are never logged: they hold prompts and answers. The sockets are a pair
(`socket.socketpair`), one of which the child inherits: there is no address that others could
connect to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np

from ...cluster.loop_calls import collector_paused
from ...cluster.transport.messages import FrameBuffer, encode_frame
from ...core.errors import (
    CapacityError,
    DraftlineError,
    EngineClosed,
    EngineFailed,
    ProtocolError,
    ReaderTooSlow,
    RequestError,
    RequestFailed,
    StageError,
    StageLost,
)
from ...core.request.output import Delta
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ..api.http.gate import TenantLimits, Verdict
from ..engine.stats import EngineStats

T = TypeVar("T")


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """A tag and its fields."""


# From an API process.


class Add(_Message, frozen=True):
    """Queue a request; the API process calls it `number` from now on.

    prompt  int32, little-endian
    """

    number: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    options: RequestOptions

    def prompt_ids(self) -> list[int]:
        """The prompt's token ids. Raises `ProtocolError` for bytes that are no int32."""
        if len(self.prompt) % 4:
            raise ProtocolError("a prompt is not a whole number of token ids")
        return np.frombuffer(self.prompt, dtype="<i4").tolist()


class Cancel(_Message, frozen=True):
    """Cancel a request; no further message about it follows."""

    number: int


class StateQuestion(_Message, frozen=True):
    """Send a `Reply` to this question."""

    question: int
    what: Literal["stats", "metrics"]


class Serving(_Message, frozen=True):
    """The API answers from now on."""


class Draining(_Message, frozen=True):
    """New requests are refused; `num_running` still run."""

    num_running: int


class Beat(_Message, frozen=True):
    """A heartbeat."""


class Enter(_Message, frozen=True):
    """Ask to admit a tenant's request. Its place is held until `Leave` or the connection's end."""

    question: int
    limits: TenantLimits
    request_id: str


class Leave(_Message, frozen=True):
    """An admitted request has ended."""

    limits: TenantLimits
    request_id: str


class TakeTokens(_Message, frozen=True):
    """Ask to admit a prompt of so many tokens."""

    question: int
    limits: TenantLimits
    count: int


class Charge(_Message, frozen=True):
    """So many tokens were generated."""

    limits: TenantLimits
    count: int


class RefusedRequest(_Message, frozen=True):
    """A tenant's request was refused, for the metrics."""

    tenant: str
    reason: str


class StoreFailed(_Message, frozen=True):
    """A store could not be reached, for the metrics."""

    store: str


GateMessage = Enter | Leave | TakeTokens | Charge | RefusedRequest | StoreFailed
FromApi = Add | Cancel | StateQuestion | Serving | Draining | Beat | GateMessage


# From the engine's process.


class EngineSetup(_Message, frozen=True):
    """The first message: settings as JSON, without plain keys, and the level of the log."""

    settings: bytes
    log_level: int


class Hello(_Message, frozen=True):
    """The engine is loaded; `max_model_len` of its requests."""

    max_model_len: int


class Health(_Message, frozen=True):
    """A heartbeat, and whether a request sent now would be served."""

    is_healthy: bool


class NextDelta(_Message, frozen=True):
    """The delta of a step. It has text only if the request has stop texts."""

    number: int
    delta: Delta


class Failed(_Message, frozen=True):
    """The error that ended a request, by its kind."""

    number: int
    kind: str
    reason: str
    field: str = ""
    retry_after_s: int | None = None

    @classmethod
    def of(cls, number: int, error: DraftlineError) -> Failed:
        """The message of an error; one of no known kind goes as `RequestFailed`."""
        kind = next((kind for kind, known in ERRORS.items() if isinstance(error, known)), "failed")
        if isinstance(error, RequestError):
            return cls(number, kind, error.message, error.field)
        retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else None
        return cls(number, kind, str(error), retry_after_s=retry_after_s)

    def error(self) -> DraftlineError:
        """The error. Raises `ProtocolError` for an unknown kind."""
        if self.kind == "request":
            return RequestError(self.field, self.reason)
        known = ERRORS.get(self.kind)
        if known is None:
            raise ProtocolError("an error of unknown kind")
        error = known(self.reason)
        if isinstance(error, CapacityError):
            error.retry_after_s = self.retry_after_s
        return error


ERRORS: dict[str, type[DraftlineError]] = {
    "request": RequestError,
    "capacity": CapacityError,
    "reader": ReaderTooSlow,
    "stage": StageError,
    "stage_lost": StageLost,
    "engine_failed": EngineFailed,
    "closed": EngineClosed,
    "failed": RequestFailed,
}


class Reply(_Message, frozen=True):
    """The answer to a `StateQuestion`; one of the two fields is set."""

    question: int
    stats: tuple[EngineStats, ...] = ()
    metrics: bytes = b""


class Judged(_Message, frozen=True):
    """The answer to `Enter` or `TakeTokens`."""

    question: int
    verdict: Verdict


class StartDrain(_Message, frozen=True):
    """Refuse new requests and finish the running ones; a second one ends them now."""


FromEngine = EngineSetup | Hello | Health | NextDelta | Failed | Reply | Judged | StartDrain


def encode_messages(messages: Sequence[FromApi | FromEngine]) -> bytes:
    """One frame's messages."""
    return _encoder.encode(messages)


def decode_from_api(data: bytes) -> list[FromApi]:
    """What `encode_messages` made of an API process's messages. Raises `ProtocolError`."""
    return _decode(_from_api, data)


def decode_from_engine(data: bytes) -> list[FromEngine]:
    """The same of the engine's. Raises `ProtocolError`."""
    return _decode(_from_engine, data)


def packed_prompt(token_ids: Sequence[int]) -> bytes:
    """`Add.prompt` of token ids. Raises `RequestError` for ids that no vocabulary has."""
    try:
        return np.array(token_ids, dtype="<i4").tobytes()
    except (OverflowError, ValueError, TypeError):
        raise RequestError("prompt", "must be token ids, whole numbers below 2**31") from None


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    # Text that is none, keys that cannot be keys and too deep nesting raise errors of Python's own;
    # parameters that nobody may ask for raise ours. What they say may quote a request.
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError, RequestError):
        raise ProtocolError("not a message between the engine and its API") from None


_encoder = msgspec.msgpack.Encoder()
_from_api: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[FromApi])
_from_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[FromEngine])


logger = logging.getLogger(__name__)

# An idle side sends a heartbeat this often.
BEAT_S = 1.0
# A side that was silent for this long counts as dead. Longer than anything that a side does between
# two reads of its socket, on a busy machine.
SILENCE_S = 10.0
# The same before its first message, while it imports its libraries, perhaps from a slow disk.
START_SILENCE_S = 120.0
# Bytes that may wait for the other side to read them, beyond what the system keeps.
MAX_UNSENT_BYTES = 32 * 1024 * 1024
# Of frames beyond this size the objects alone would keep the garbage collector busy.
LARGE_FRAME_BYTES = 256 * 1024


class Connection(asyncio.Protocol):
    """Sends and receives messages on one event loop; the messages of one turn are one frame.

    on_message  called for each message, in order
    on_lost     called once: when the other side is gone, does not keep to the protocol, or this
                side closed
    on_silence  called each second once the other side has been silent for `silence_s`
    beat        returns the heartbeat message
    """

    def __init__(
        self,
        decode: Callable[[bytes], list[Any]],
        *,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        on_silence: Callable[[], None],
        beat: Callable[[], FromApi | FromEngine],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._decode = decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_silence = on_silence
        self._beat = beat
        self.silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer()
        self._unsent: list[FromApi | FromEngine] = []
        self._transport: asyncio.Transport | None = None
        self._heard_at = self._loop.time()
        self._has_heard = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_lost = False
        self.num_frames_sent = self.num_frames_received = 0

    @property
    def is_silent(self) -> bool:
        """Whether the other side has been silent too long."""
        limit_s = self.silence_s if self._has_heard else max(self.silence_s, START_SILENCE_S)
        return self._loop.time() - self._heard_at > limit_s

    @property
    def is_full(self) -> bool:
        """Whether so much is unread by the other side that only small messages should be sent."""
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > MAX_UNSENT_BYTES

    def send(self, message: FromApi | FromEngine) -> None:
        """Send a message with the frame of this turn of the loop."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the queued messages."""
        messages, self._unsent = self._unsent, []
        if messages and self._transport is not None and not self.is_lost:
            self._transport.write(encode_frame(encode_messages(messages)))
            self.num_frames_sent += 1

    def close(self) -> None:
        """Send the queued messages, and end the connection."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(BEAT_S, self._on_beat)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._heard_at, self._has_heard = self._loop.time(), True
        try:
            for frame in self._frames.feed(data):
                self.num_frames_received += 1
                is_large = len(frame) > LARGE_FRAME_BYTES
                with collector_paused() if is_large else nullcontext():
                    messages = self._decode(frame)
                for message in messages:
                    self._on_message(message)
        except ProtocolError as error:
            logger.error("event=engine_socket_garbled error=%r", str(error))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Called by asyncio."""
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_lost()

    def _on_beat(self) -> None:
        # Nothing is added to what a side that does not read is to read still.
        if not self.is_full:
            self.send(self._beat())
        self._timer = self._loop.call_later(BEAT_S, self._on_beat)
        if self.is_silent:
            self._on_silence()
