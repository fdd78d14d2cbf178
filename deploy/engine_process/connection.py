"""One side of the socket between the engine's process and an API process.

A pair of connected sockets (`socket.socketpair`), one of which the child inherits: there is no
address that others could connect to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

from ...cluster.loop_calls import collector_paused
from ...cluster.transport.messages import FrameBuffer, encode_frame
from ...core.errors import ProtocolError
from .messages import FromApi, FromEngine, encode_messages

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
