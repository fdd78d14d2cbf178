"""A link to a drafter server: one bidirectional gRPC stream carries all requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

import grpc

from ...core.errors import DrafterError, DraftlineError, ProtocolError
from ...core.proposals import FeatureLayers
from .access import TlsFiles, token_metadata
from .failures import CircuitBreaker, RetryPolicy, Silence, failure_reason
from .features import (
    MAX_FEATURE_BYTES,
    PIECE_BYTES,
    FeatureColumns,
    feature_columns,
    newest,
    pieces,
)
from .link import MAX_NODES, DrafterMessage, LinkEvents
from .wire import (
    DEFAULT_MAX_BYTES,
    METHOD,
    Greeting,
    decode_answer,
    decode_hello,
    encode_hello,
    encode_more_features,
    encode_step,
)

logger = logging.getLogger(__name__)

AddressProvider = Callable[[], Awaitable[str]]
Replace = Callable[[], Awaitable[None]]
# One that hangs again and again may do so for a reason that no new process mends.
RESTARTS = RetryPolicy(tolerated=1, first_delay_s=5.0, max_delay_s=300.0)


class NoAnswer(DrafterError):
    """An address provider's server should run, but says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """How to reach a drafter server.

    address_timeout_s  for finding the address, which may start the server
    connect_timeout_s  for connecting and the first answer together
    max_message_bytes  larger messages are refused, both ways
    token              shown with the call; None: the server must ask for none
    silence            what may stay unanswered before the server counts as dead
    """

    address_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    max_message_bytes: int = DEFAULT_MAX_BYTES
    tls: TlsFiles | None = None
    token: str | None = None
    silence: Callable[[], Silence] = Silence


class GrpcLink:
    """Speaks to one drafter server. Every failure ends the connection and becomes `failed`.

    address  host:port, or an awaitable callable that is called before each connection
    replace  ends a server that runs but does not answer, so that `address` gives another; None
             where it is not ours to end. Called in the task that connects, never more often than
             `RESTARTS` says
    features  hidden states that the target returns, for a server whose drafter reads some of them
    """

    def __init__(
        self,
        name: str,
        address: str | AddressProvider,
        options: GrpcOptions | None = None,
        *,
        replace: Replace | None = None,
        max_nodes: int = MAX_NODES,
        keeps_answers: bool = True,
        features: FeatureLayers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.max_nodes = max_nodes
        self.keeps_answers = keeps_answers
        self.reads_features = features is not None
        self._features = features
        # As the server that it is connected to reads them.
        self._columns: FeatureColumns | None = None
        self._address = address
        self._options = options or GrpcOptions()
        self._replace = replace
        self._silence = self._options.silence()
        self._restarts = CircuitBreaker(RESTARTS, random.Random())
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._events: LinkEvents | None = None
        self._message: DrafterMessage | None = None
        self._outbox = _outbox()

    def connect(self, events: LinkEvents) -> None:
        """Connect in a task of the running loop."""
        assert self._task is None, "connected already"
        self._events = events
        self._message = None
        self._outbox = _outbox()
        self._task = asyncio.get_running_loop().create_task(self._run(events))

    def send(self, message: DrafterMessage) -> None:
        """Hand the message to the stream; it leaves in the loop's next turn."""
        assert self._message is None, "one message at a time"
        assert self._events is not None, "send before connect"
        budget_s = max(0.0, message.deadline - self._clock())
        try:
            parts = self._encoded(message, budget_s)
        except ProtocolError as error:
            self._events.failed(DrafterError(str(error)))
            return
        self._message = message
        self._outbox.put_nowait(parts)

    def unanswered(self) -> None:
        """See `DrafterLink`; after too many in a row the next connection is to a new server."""
        self._silence.messages += 1

    def disconnect(self) -> None:
        """Cancel the stream."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel the stream and wait until it is gone."""
        task = self._task
        self.disconnect()
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self, events: LinkEvents) -> None:
        try:
            await self._converse(events)
            error = DrafterError("its server ended the stream")
        except grpc.aio.AioRpcError as cause:
            error = DrafterError(f"{cause.code().name}: {cause.details()}")
        except TimeoutError:
            error = DrafterError("no connection in time")
        except DraftlineError as cause:
            error = DrafterError(str(cause))
        except Exception as cause:
            # An address provider asks another system, which may fail in its own ways.
            logger.debug("drafter=%s event=link_failed", self.name, exc_info=True)
            error = DrafterError(failure_reason(cause))
        self._task = None
        events.failed(error)

    async def _converse(self, events: LinkEvents) -> None:
        async with asyncio.timeout(self._options.address_timeout_s):
            address = await self._find()
        async with contextlib.AsyncExitStack() as stack:
            channel = await stack.enter_async_context(self._channel(address))
            call = channel.stream_stream(METHOD)(metadata=token_metadata(self._options.token))
            answers = aiter(call)
            await self._greet(call, answers)
            writer = asyncio.create_task(self._write(call))
            stack.push_async_callback(_end, writer)
            events.ready()
            async for data in answers:
                message, self._message = self._message, None
                if message is None:
                    raise ProtocolError("wire: an answer to nothing")
                self._silence.end()
                self._restarts.succeed()
                answer = decode_answer(data, message, self.name)
                events.server_load(answer.num_others, is_draining=answer.is_draining)
                events.answered(answer.proposals, answer.report, answer.seconds)

    async def _find(self) -> str:
        """The address, of a new server where the last one does not answer."""
        is_time = self._clock() >= self._restarts.retry_at
        if self._replace is not None and self._silence.is_dead and is_time:
            logger.warning("drafter=%s event=no_answer replacing its server", self.name)
            self._restarts.fail(self._clock())
            self._silence.end()
            await self._replace()
        if isinstance(self._address, str):
            return self._address
        try:
            return await self._address()
        except NoAnswer:
            self._silence.connects += 1
            raise

    async def _greet(self, call: grpc.aio.StreamStreamCall, answers: AsyncIterator[bytes]) -> None:
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                await call.write(encode_hello(Greeting(self.name)))
                server = decode_hello(await anext(answers, b""))
        except TimeoutError:
            self._silence.connects += 1
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._silence.connects += 1
            raise
        self._silence.connected()
        self._columns = self._columns_for(server.features)

    def _columns_for(self, read: FeatureLayers | None) -> FeatureColumns | None:
        if self._features is None and read is None:
            return None
        columns = feature_columns(self._features, read)
        if 2 * columns.row_bytes > self._options.max_message_bytes:
            raise DrafterError("a token's features have no room in a message")
        return columns

    def _channel(self, address: str) -> grpc.aio.Channel:
        options = channel_options(self._options.max_message_bytes)
        if self._options.tls is None:
            return grpc.aio.insecure_channel(address, options)
        options += self._options.tls.channel_options()
        return grpc.aio.secure_channel(address, self._options.tls.channel_credentials(), options)

    def _encoded(self, message: DrafterMessage, budget_s: float) -> Iterable[bytes]:
        """A message, behind features that it has no room for."""
        most = self._options.max_message_bytes
        if not message.features or self._columns is None:
            return (encode_step(message, budget_s, most),)
        rows = newest([self._columns.of(rows) for rows in message.features], MAX_FEATURE_BYTES)
        # Texts take the rest of a message.
        *more, last = pieces(rows, min(PIECE_BYTES, most // 4))
        step = encode_step(replace(message, features=last), budget_s, most)
        # Each is encoded when the one before has left: the loop has other work between them.
        return chain((encode_more_features(piece, most) for piece in more), (step,))

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            for part in await self._outbox.get():
                await call.write(part)


def _outbox() -> asyncio.Queue[Iterable[bytes]]:
    """Where a message waits for the stream."""
    return asyncio.Queue(maxsize=1)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    # What a write failed with, the reader has met, too.
    await asyncio.gather(task, return_exceptions=True)


def channel_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    """gRPC options of a client; when to reconnect is the hub's decision, not gRPC's."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Shared connections would carry gRPC's own back-off from one attempt to the next.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
