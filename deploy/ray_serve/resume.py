"""Continues a request at another replica after its replica was lost; does not import Ray.

Noise and rules depend on positions alone. A replica that gets the prompt, the seed and the tokens
sent so far (`RequestOptions.answered`) commits the tokens that the lost one would have committed,
so the reader sees one stream. A stream without items carries heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from ...core.errors import (
    CapacityError,
    DraftlineError,
    EngineClosed,
    EngineFailed,
    RequestSuspected,
    StageLost,
)
from ...core.request.output import TARGET_SOURCE, Delta, RequestMetrics
from ...core.request.sampling_params import RequestOptions, SamplingParams

if TYPE_CHECKING:
    from ..api.http.metrics import ServerMetrics

logger = logging.getLogger(__name__)

# Seconds before the next try; the pause doubles with each try.
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
# Errors that need not be the request's fault: another replica, or this one soon, may take it.
RESUMABLE = (StageLost, EngineFailed, EngineClosed, CapacityError)

# Starts a request at some replica; returns what `EngineReplica.stream` returns.
Begin = Callable[[SamplingParams, RequestOptions], AsyncGenerator[Sequence[Delta], None]]


class ReplicaDied(StageLost):
    """The replica of a request died or is silent; the request may be the cause."""


class NoReplica(StageLost):
    """No replica takes requests."""


class OtherModel(StageLost):
    """A replica of a running update cannot continue the answer of another model."""


class ServerEnds(EngineClosed):
    """The server stops, so no replica will come."""


# Errors that do not come from the request: it may be sent elsewhere.
PASSING = (CapacityError, NoReplica, ServerEnds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """Limits of resuming one request; then it ends with 503.

    max_tries  replicas that may die with it, beyond the first: one that kills them must not kill
               all
    timeout_s  longest time from a loss to the next token
    """

    max_tries: int = 3
    timeout_s: float = 120.0


async def resumed(
    begin: Begin,
    params: SamplingParams,
    options: RequestOptions,
    limits: ResumeLimits,
    counts: ServerMetrics,
    request_id: str = "",
) -> AsyncGenerator[Sequence[Delta], None]:
    """One request's deltas, from as many replicas as it takes; `params` have a seed.

    `request_id`: for the log. Raises what `begin` raises if the request cannot go on elsewhere.
    """
    sent = SentAnswer(params, options)
    losses = Losses(limits, asyncio.get_running_loop().time)
    while True:
        try:
            async with aclosing(_one_try(begin, sent, losses)) as batches:
                async for deltas in batches:
                    if (cause := losses.end()) is not None:
                        counts.record_resumed(cause)
                        logger.warning(
                            "event=request_resumed request_id=%s cause=%s", request_id, cause
                        )
                    yield deltas
            return
        except RESUMABLE as error:
            if not losses.may_go_on(error, has_begun=bool(sent.token_ids)):
                if losses.cause is not None:
                    counts.record_lost(losses.cause)
                    logger.warning(
                        "event=request_lost request_id=%s cause=%s", request_id, losses.cause
                    )
                raise losses.error(error) from error
            await asyncio.sleep(losses.backoff_s())


async def _one_try(
    begin: Begin, sent: SentAnswer, losses: Losses
) -> AsyncGenerator[Sequence[Delta], None]:
    """The deltas of one replica, up to the end of the answer."""
    async with aclosing(begin(*sent.rest())) as batches:
        while True:
            deltas = await _next(batches, losses.deadline)
            yield [sent.add(delta) for delta in deltas]
            if deltas[-1].finish_reason is not None:
                return


async def _next(
    batches: AsyncGenerator[Sequence[Delta], None], deadline: float | None
) -> Sequence[Delta]:
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            deltas = await anext(batches, None)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise NoReplica("no replica went on with this request in time") from error
    if deltas is None:
        raise ReplicaDied("the replica of this request left it unanswered")
    return deltas


class Losses:
    """The tries of one request since its replica was lost, and whether there may be another.

    clock  of the event loop; seconds
    """

    def __init__(self, limits: ResumeLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._num_died = self._num_tries = 0
        self._first: DraftlineError | None = None
        # Why the request has no replica now, and when it must have one again.
        self.cause: str | None = None
        self.deadline: float | None = None

    def may_go_on(self, error: DraftlineError, *, has_begun: bool) -> bool:
        """Whether to try another replica after `error`.

        A request that was refused before it started anywhere is not tried again.
        """
        is_new = not has_begun and self.cause is None
        if is_new and isinstance(error, PASSING):
            return False
        if self.cause is None:
            self.cause, self._first = cause_of(error), error
            self.deadline = self._clock() + self._limits.timeout_s
            self._num_tries = 0
        self._num_died += isinstance(error, ReplicaDied | EngineFailed)
        if isinstance(error, RequestSuspected | ServerEnds):
            return False
        is_in_time = self.deadline is not None and self._clock() < self.deadline
        return is_in_time and self._num_died <= self._limits.max_tries

    def backoff_s(self) -> float:
        """Seconds until the next try, at most until the deadline."""
        assert self.deadline is not None, "nothing is lost"
        self._num_tries += 1
        backoff_s = min(FIRST_BACKOFF_S * 2 ** (self._num_tries - 1), MAX_BACKOFF_S)
        return max(0.0, min(backoff_s, self.deadline - self._clock()))

    def end(self) -> str | None:
        """The request has a replica again; returns why it had none, or None."""
        cause, self.cause, self.deadline = self.cause, None, None
        return cause

    def error(self, last: DraftlineError) -> DraftlineError:
        """The error that the request ends with: the loss rather than the last try's error."""
        if self._first is not None and isinstance(last, PASSING):
            return self._first
        return last


def cause_of(error: DraftlineError) -> str:
    """The name of a loss in metrics."""
    match error:
        case ReplicaDied():
            return "replica_died"
        case StageLost():
            return "stage_lost"
        case EngineFailed():
            return "engine_failed"
        case EngineClosed():
            return "replica_stopped"
    return "refused"


@dataclass(slots=True)
class SentAnswer:
    """The part of an answer that its reader has, and the request for the rest."""

    params: SamplingParams
    options: RequestOptions
    token_ids: list[int] = field(default_factory=list)
    _began_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _first_token_at: float = 0.0
    # Sources of each delta: of the current replica, and of the lost ones.
    _sources: list[tuple[str, ...]] = field(default_factory=list)
    _lost_sources: list[tuple[str, ...]] = field(default_factory=list)
    _num_begun: int = 0

    def rest(self) -> tuple[SamplingParams, RequestOptions]:
        """Parameters and options of the request for the rest."""
        self._lost_sources += self._sources
        self._sources = []
        self._num_begun += 1
        if not self.token_ids:
            return self.params, self.options
        # Log-probabilities of the prompt came with the first token.
        params = replace(self.params, prompt_logprobs=None)
        return params, replace(self.options, answered=tuple(self.token_ids))

    def add(self, delta: Delta) -> Delta:
        """Add a delta; returns it, the last one with metrics of the whole request."""
        if delta.token_ids and not self.token_ids:
            self._first_token_at = asyncio.get_running_loop().time()
        self.token_ids += delta.token_ids
        self._sources.append(delta.sources)
        if delta.metrics is None or self._num_begun == 1:
            return delta
        return delta._replace(metrics=self._whole(delta.metrics))

    def _whole(self, last: RequestMetrics) -> RequestMetrics:
        """The last replica's metrics, with the accepted draft tokens of the lost ones.

        Draft tokens that lost replicas refused are not known. Times are on the last one's clock. If
        another one sent the first token, all time before it counts as prefill.
        """
        now = asyncio.get_running_loop().time()
        arrival_time = last.finish_time - (now - self._began_at)
        if not self._lost_sources:
            return replace(last, arrival_time=arrival_time)
        accepted = Counter(
            source
            for sources in self._lost_sources
            for source in sources
            if source != TARGET_SOURCE
        )
        # The first token came with the prompt, from no verification step.
        lengths = [length for sources in self._lost_sources[1:] for length in _lengths(sources)]
        return replace(
            last,
            num_steps=last.num_steps + len(lengths),
            num_draft_tokens=last.num_draft_tokens + accepted.total(),
            drafted_by_source=accepted + Counter(last.drafted_by_source),
            accepted_by_source=accepted + Counter(last.accepted_by_source),
            accepted_lengths=(*lengths, *last.accepted_lengths),
            arrival_time=arrival_time,
            start_time=arrival_time,
            first_token_time=last.finish_time - (now - self._first_token_at),
        )


def _lengths(sources: Sequence[str]) -> list[int]:
    """Accepted draft tokens of each verification step of one delta."""
    if sources and sources[0] == TARGET_SOURCE:
        # Without drafts each token had a pass of its own.
        return [0] * len(sources)
    return [sum(source != TARGET_SOURCE for source in sources)]


T = TypeVar("T")


async def with_heartbeats(
    items: AsyncGenerator[T, None], period_s: float
) -> AsyncGenerator[T | None, None]:
    """The items, and None (a heartbeat) after each `period_s` without one. Closes `items`."""
    waiting: asyncio.Future[T] | None = None
    async with aclosing(items):
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(items))
                done, _ = await asyncio.wait({waiting}, timeout=period_s)
                if not done:
                    yield None
                    continue
                try:
                    item = waiting.result()
                except StopAsyncIteration:
                    return
                waiting = None
                yield item
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


async def without_heartbeats(
    items: AsyncIterator[T | None], silence_s: float, is_served: Callable[[], Awaitable[bool]]
) -> AsyncGenerator[T, None]:
    """The items of `with_heartbeats`. Raises `ReplicaDied` after a silence of `silence_s`.

    Before its first item or heartbeat the stream may wait in a queue. So after each silence then,
    `is_served` is asked whether requests are served at all; if not, raises `NoReplica`.
    """
    has_begun = False
    while True:
        waiting = asyncio.ensure_future(anext(items))
        try:
            while not (await asyncio.wait({waiting}, timeout=silence_s))[0]:
                problem = f"the replica of this request is silent for {silence_s:g} s"
                if has_begun:
                    raise ReplicaDied(problem)
                if not await is_served():
                    raise NoReplica(problem)
            item = waiting.result()
        except StopAsyncIteration:
            return
        finally:
            waiting.cancel()
            # Ray ends a cancelled wait with an error of its own. asyncio prints errors that nobody
            # reads.
            waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        has_begun = True
        if item is not None:
            yield item
