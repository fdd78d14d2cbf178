"""Runs a job into an answer of several items: a response or a message, as one body or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from ....cluster.loop_calls import off_loop
from ....core.request.output import FinishReason, RequestMetrics, StopReason, TokenLogProb
from ..engine_client import EngineClient
from ..errors import ApiError, to_api_error
from ..http.metrics import AnswerRecorder
from ..tools.events import Event, Parser
from .completions import metrics_block
from .job import CompletionOutput, Job, Piece, run_job
from .json_parts import write_json

Data = dict[str, Any]


class ItemWriter(Protocol):
    """One answer while it is generated. Each call returns the events of what it adds."""

    def begin(self) -> list[Data]:
        """The events that a stream begins with."""
        ...

    def add(self, events: Iterable[Event], tokens: Sequence[TokenLogProb] = (), /) -> list[Data]:
        """The next parts of the answer. `tokens` stand beside the text that comes first."""
        ...

    def finish(
        self, reason: FinishReason, stop: StopReason, metrics: RequestMetrics | None, /
    ) -> list[Data]:
        """The answer has ended; `stop` is the stop text or token that ended it."""
        ...

    def last_event(self, extra: Data) -> Data:
        """The event that ends a stream, with fields beyond the API's."""
        ...

    def fail(self, error: ApiError) -> Data:
        """The event that ends a stream after an error."""
        ...

    def body(self, extra: Data | None = None) -> Data:
        """The answer so far, with fields beyond the API's."""
        ...


class ItemRun:
    """Runs one job into one answer."""

    def __init__(
        self, engine_client: EngineClient, job: Job, parser: Parser, writer: ItemWriter
    ) -> None:
        self._engine_client = engine_client
        self._job = job
        self._parser = parser
        self._writer = writer
        self._answer: CompletionOutput = job.answers()[0]

    async def whole(self, metrics: AnswerRecorder) -> bytes:
        """The body as JSON. Raises what `run_job` raises."""
        async with aclosing(run_job(self._engine_client, self._job, metrics)) as deltas:
            async for _, delta in deltas:
                self._answer.add(delta)
        return await off_loop(self._body)

    def _body(self) -> bytes:
        self._write(self._answer.whole())
        return write_json(self._writer.body(metrics_block([self._answer]))).encode()

    async def events(self, metrics: AnswerRecorder) -> AsyncGenerator[str, None]:
        """The events of a stream, with their names.

        An error before the first event is raised; a later one is sent as an event.
        """
        has_begun = False
        try:
            async with aclosing(run_job(self._engine_client, self._job, metrics)) as deltas:
                async for _, delta in deltas:
                    parts = [] if has_begun else self._writer.begin()
                    parts += self._write(self._answer.add(delta))
                    for event in parts:
                        has_begun = True
                        yield framed(event)
        except Exception as error:  # the status is sent: only an event can tell the client
            if not has_begun:
                raise
            yield framed(self._writer.fail(to_api_error(error)))
        else:
            yield framed(self._writer.last_event(metrics_block([self._answer])))

    def _write(self, piece: Piece) -> list[Data]:
        """The events of a piece."""
        tokens = [token for token in piece.log_probs or () if token is not None]
        events = self._parser.push(piece.text)
        reason = piece.finish_reason
        if reason is None:
            return self._writer.add(events, tokens)
        parts = self._writer.add([*events, *self._parser.finish()], tokens)
        return parts + self._writer.finish(reason, piece.stop_reason, self._answer.metrics)


def framed(event: Data) -> str:
    """An event as server-sent events spell it, with its name."""
    return f"event: {event['type']}\ndata: {write_json(event)}\n\n"
