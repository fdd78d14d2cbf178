"""An engine behind a Ray Serve deployment handle, with Ray's errors turned into ours."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve._private.utils import generate_request_id
from ray.serve.context import _get_serve_request_context, _serve_request_context
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from ...cluster.config import EngineConfig
from ...core.errors import CapacityError, EngineClosed
from ...core.request.output import Delta
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...models.load.model_info import read_model_info
from ..api.engine_client import RemoteEngineClient
from ..api.http.metrics import ServerMetrics
from ..engine.stats import EngineStats
from .deployment_plan import text_key
from .resume import (
    NoReplica,
    ReplicaDied,
    ResumeLimits,
    ServerEnds,
    resumed,
    without_heartbeats,
)

# A replica that does not answer for this long is loading, or gone.
CONTROL_TIMEOUT_S = 5.0
# A health check needs a quick answer.
HEALTH_TIMEOUT_S = 1.0
SEED_BITS = 62


class RayEngineClient(RemoteEngineClient):
    """The replicas of one engine deployment. A request that loses its replica continues at
    another one.

    silence_s  a stream without a heartbeat for this long has lost its replica
    counts     counts requests that were resumed, or could not be
    limits     of resuming
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        config: EngineConfig,
        silence_s: float,
        counts: ServerMetrics,
        limits: ResumeLimits | None = None,
    ) -> None:
        self._handle = handle
        self._silence_s = silence_s
        self._limits = limits or ResumeLimits()
        self._counts = counts
        self._is_ending = False
        self._text_key = text_key(config)
        self._streams = handle.options(stream=True)
        self._config = config

    async def start(self) -> None:
        """Read the model's tokenizer and sizes. Raises `CheckpointError`."""
        info = await asyncio.to_thread(read_model_info, self._config.model)
        self.max_model_len = self._config.max_model_len or info.max_context_len
        await self._load_tokenizer(str(info.path))

    async def close(self) -> None:
        """Nothing to release: Ray Serve owns the replicas."""

    def _batches(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
    ) -> AsyncGenerator[Sequence[Delta], None]:
        if params.seed is None:
            # The seed is drawn here, so it is the same for every replica.
            params = replace(params, seed=secrets.randbits(SEED_BITS))
        begin = partial(self._begin, tuple(prompt), request_id)
        return resumed(begin, params, options, self._limits, self._counts, request_id)

    async def _begin(
        self,
        prompt: tuple[int, ...],
        request_id: str,
        params: SamplingParams,
        options: RequestOptions,
    ) -> AsyncGenerator[list[Delta], None]:
        """Deltas from one replica."""
        if self._is_ending:
            raise ServerEnds("all replicas of the server end")
        with _own_call():
            batches: Any = self._streams.stream.remote(
                prompt, params, options, request_id, self._text_key
            )
        try:
            with _ray_errors():
                alive = without_heartbeats(aiter(batches), self._silence_s, self.is_healthy)
                async with aclosing(alive):
                    async for deltas in alive:
                        yield deltas
        finally:
            # Does nothing to a stream that has ended.
            batches.cancel()

    async def stats(self) -> list[EngineStats]:
        """Counters and gauges of the replicas that answer in time."""
        return await self._ask_all("stats")

    async def is_healthy(self) -> bool:
        """Whether at least one replica serves."""
        # A replica that does not answer must not hide another: Ray Serve sends requests past it.
        answers = (self._ask_all("is_healthy", HEALTH_TIMEOUT_S), self._ask_one())
        everyone, someone = await asyncio.gather(*answers)
        return someone or any(everyone)

    async def end_requests(self) -> None:
        """Close every replica's engine: its requests end with an error and are not resumed."""
        self._is_ending = True
        await self._ask_all("end_requests")

    async def _ask_one(self) -> bool:
        with _own_call():
            asking: Any = self._handle.is_healthy.remote()
        try:
            return await asyncio.wait_for(asking, HEALTH_TIMEOUT_S)
        except (TimeoutError, RayError, RayServeException, BackPressureError):
            asking.cancel()
            return False

    async def _ask_all(self, method: str, timeout_s: float = CONTROL_TIMEOUT_S) -> list[Any]:
        response = self._handle.broadcast(method)
        try:
            answers = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


@contextmanager
def _own_call() -> Iterator[None]:
    """Have a call made here get an id of its own.

    Ray Serve gives all calls of one HTTP request the same, and its router knows those that wait by
    their ids: of two such calls, as `n` makes them, one would wait for ever.
    """
    own: Any = replace(_get_serve_request_context(), _internal_request_id=generate_request_id())
    before = _serve_request_context.set(own)
    try:
        yield
    finally:
        _serve_request_context.reset(before)


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise what the replica raised; where there is no replica, raise an error of ours."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except BackPressureError as error:
        raise CapacityError(error.message) from error
    except RayActorError as error:
        raise ReplicaDied("the replica of this request died") from error
    except ReplicaUnavailableError as error:
        raise NoReplica("the replica of this request died") from error
    except DeploymentUnavailableError as error:
        raise ServerEnds("there are no replicas any more") from error
    except RequestCancelledError as error:
        raise EngineClosed("the replica of this request stopped") from error
