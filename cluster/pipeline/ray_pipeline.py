"""A pipeline whose stages are Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from ...core.errors import DraftlineError, ProtocolError, StageError, StageLost
from ...core.interfaces import StageMemory
from ...core.steps import StepInput, StepOutput
from ..config import TransportName
from ..transport.distributed import DistributedTransport
from ..transport.hidden_link import Backend
from ..transport.messages import load_loops
from ..transport.stage_spec import InFlightSteps, StageSpec
from ..transport.stage_worker import StagePlace, StageSizes, check_nccl, fastest_backend
from .supervisor import Taken

logger = logging.getLogger(__name__)
DEATH_TIMEOUT_S, DEATH_POLL_S = 3.0, 0.02
# A worker process starts within this where there is room.
ROOM_S = 20.0
# A stage of a lost pipeline that lives ends what it does. First those that nothing holds up; those
# that do not even answer are killed then, which their neighbours wait for: on other machines Ray
# gives a process five seconds before it is made to end.
SETTLE_SECONDS = (0.3, 6.0)
ANSWER_SLACK_S = 1.0
# The title that Ray gives to processes of stage actors.
ACTOR_TITLE = b"ray::StageWorker"


class StageSource(Protocol):
    """Workers for stages: kept ones, spare ones that wait, or new ones. Used on one event loop."""

    async def take(self, index: int, spec: StageSpec) -> Taken:
        """A `StageWorker` for this stage, which may still be starting. Nobody else gets it.

        One that is kept ran the same stage before and has its weights still. It may hang, as any
        process whose last coordinator is gone.
        """
        ...

    async def drop(self, worker: ActorHandle) -> None:
        """Kill a worker at once."""
        ...

    def replenish(self) -> None:
        """Start spare workers in the place of those that were taken; does not wait."""
        ...


class RayPipeline:
    """Runs each stage in an actor of its own; several steps are under way at once.

    source           where the stages' actors come from (`actors/kept_actors.py`)
    transport        `auto` is `nccl` where every stage has a GPU of its own, else `distributed`
    start_timeout_s  loading the model included

    Needs a Ray that is initialised. `restart` brings a pipeline with a lost stage back.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        source: StageSource,
        *,
        transport: TransportName = "auto",
        start_timeout_s: float = 600.0,
    ) -> None:
        assert specs, "a pipeline has at least one stage"
        self._specs = tuple(specs)
        self._source = source
        self._transport_name: TransportName = transport
        # One more than stages, so that no stage waits for the coordinator.
        self._max_in_flight = len(specs) + 1
        self._start_timeout_s = start_timeout_s
        self._lifecycle = asyncio.Lock()
        self._stages: dict[int, ActorHandle] = {}
        self._places: dict[int, StagePlace] = {}
        self._transport: DistributedTransport | None = None
        self._steps = InFlightSteps(self._max_in_flight)
        self._open = False
        self._num_blocks = 0
        self._memory: tuple[StageMemory, ...] = ()

    @property
    def num_stages(self) -> int:
        """See `Pipeline`."""
        return len(self._specs)

    @property
    def max_in_flight(self) -> int:
        """See `Pipeline`."""
        return self._max_in_flight

    @property
    def decodes_several(self) -> bool:
        """See `Pipeline`: stages in other processes take a token a request and step."""
        return False

    @property
    def num_blocks(self) -> int:
        """See `Pipeline`."""
        return self._num_blocks

    @property
    def memory(self) -> Sequence[StageMemory]:
        """See `Pipeline`."""
        return self._memory

    async def start(self) -> None:
        """See `Pipeline`; raises what the stages' builds raised, such as `CheckpointError`."""
        async with self._lifecycle:
            assert not self._stages, "the pipeline is open already"
            await self._start_in_time()

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """See `Pipeline`."""
        steps = self._steps
        if steps.lost.is_set() or not self._open:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(steps.error())
            return future
        assert self._transport is not None
        sequence, future = steps.add()
        try:
            self._transport.send(sequence, step)
        except ProtocolError as error:
            steps.answer(sequence, StageError(str(error)))
        return future

    async def close(self) -> None:
        """See `Pipeline`; takes less than 10 seconds in any case."""
        async with self._lifecycle:
            await self._close("the pipeline was closed")

    async def restart(self) -> tuple[int, ...]:
        """See `Pipeline`: stages that live keep their processes and weights."""
        async with self._lifecycle:
            before = dict(self._stages)
            can_stay = self._transport is not None and self._transport.leaves_stages_idle
            self._disconnect("the pipeline is restarted")
            if not can_stay or not ray.is_initialized():
                await self._close("the pipeline is restarted")
            await self._settle_all()
            await self._start_in_time()
            return tuple(i for i, stage in self._stages.items() if before.get(i) != stage)

    async def _start_in_time(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s) as limit:
                await self._start(limit)
        except TimeoutError as error:
            raise StageLost(
                f"the stages did not start within {self._start_timeout_s:g} s; the cluster "
                "needs free resources for all of them"
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, DraftlineError):
                raise error.cause from error
            raise StageLost(f"a stage did not start: {error.cause}") from error
        except RayActorError as error:
            raise StageLost(f"a stage died while it started: {error}") from error
        finally:
            if not self._open:
                await self._close("the pipeline did not start")

    async def _start(self, limit: asyncio.Timeout) -> None:
        self._steps = steps = InFlightSteps(self._max_in_flight)
        # While the stages load.
        loading = asyncio.create_task(asyncio.to_thread(load_loops))
        telling = asyncio.get_running_loop().call_later(ROOM_S, self._tell_of_room)
        try:
            places = await asyncio.gather(*map(self._free_worker, range(len(self._specs))))
        finally:
            telling.cancel()
        await loading
        stages = [self._stages[index] for index in range(len(self._specs))]
        backend = self._backend(places)
        self._transport = DistributedTransport(places, backend, self._max_in_flight)
        # Before caches fill the memory: what connects GPUs takes some of it.
        await self._transport.meet(stages, _seconds_left(limit))
        builds: list[Any] = [stage.build.remote() for stage in stages]
        await asyncio.gather(*builds)
        asking: list[Any] = [stage.sizes.remote() for stage in stages]
        sizes: list[StageSizes] = await asyncio.gather(*asking)
        self._num_blocks = min(size.num_blocks for size in sizes)
        self._memory = tuple(size.memory for size in sizes)
        # A stage that replaces another has as many.
        self._specs = tuple(replace(spec, num_blocks=self._num_blocks) for spec in self._specs)
        await self._transport.open(stages, steps)
        if steps.lost.is_set():
            raise steps.error()
        self._open = True
        self._source.replenish()

    def _tell_of_room(self) -> None:
        """Say why nothing happens, long before the time for the start is over."""
        cpus = sum(spec.num_cpus for spec in self._specs)
        gpus = sum(spec.num_gpus for spec in self._specs)
        logger.warning(
            "event=stages_wait stages=%d need=%gcpu,%ggpu free=%s",
            len(self._specs), cpus, gpus, _free_resources(),
        )  # fmt: skip

    async def _free_worker(self, index: int) -> StagePlace:
        """Where the stage will be. Its worker does nothing else and knows it."""
        while index not in self._stages:
            taken = await self._source.take(index, self._specs[index])
            self._stages[index] = taken.actor
            if taken.is_kept and not await self._settle(index, SETTLE_SECONDS[-1]):
                await self._drop(index)
        # By pickle, as all arguments of Ray's calls: a spec may be of any class that builds a
        # stage, and goes to an actor that this pipeline's own source has started.
        packed = pickle.dumps(self._specs[index])
        assigning: Any = self._stages[index].assign.remote(index, packed)
        self._places[index] = place = await assigning
        return place

    async def _settle_all(self) -> None:
        """Keep the stages that end what they do in time."""
        busy = list(self._stages)
        for seconds in SETTLE_SECONDS:
            idle = await asyncio.gather(*(self._settle(index, seconds) for index in busy))
            busy = [index for index, is_idle in zip(busy, idle, strict=True) if not is_idle]
            busy = [index for index in busy if index in self._stages]
        for index in busy:
            logger.info("event=stage_dropped stage=%d reason=busy", index)
            await self._drop(index)

    async def _settle(self, index: int, seconds: float) -> bool:
        """Whether a stage waits for work again. One that is dead or does not answer is dropped."""
        settling: Any = self._stages[index].settle.remote(seconds)
        try:
            return await asyncio.wait_for(settling, seconds + ANSWER_SLACK_S)
        except (TimeoutError, RayError) as error:
            logger.info("event=stage_dropped stage=%d reason=%s", index, type(error).__name__)
            if isinstance(error, TimeoutError):
                self._end_process(index)
            await self._drop(index)
            return False

    async def _drop(self, index: int) -> None:
        stage = self._stages.pop(index, None)
        self._places.pop(index, None)
        if stage is not None:
            await self._source.drop(stage)

    def _end_process(self, index: int) -> None:
        """End a process of this machine: Ray takes seconds to end one that is stopped."""
        place = self._places.get(index)
        if place is None or place.node != ray.get_runtime_context().get_node_id():
            return
        with contextlib.suppress(OSError):
            # Another process may have its number by now.
            if Path(f"/proc/{place.pid}/cmdline").read_bytes().startswith(ACTOR_TITLE):
                os.kill(place.pid, signal.SIGKILL)

    def _backend(self, places: Sequence[StagePlace]) -> Backend:
        """Of hidden states between stages at these places. Raises `ConfigError` without GPUs for
        NCCL."""
        if self._transport_name == "distributed":
            return "gloo"
        if self._transport_name == "nccl":
            check_nccl(places)
            return "nccl"
        backend = fastest_backend(places)
        logger.info("event=stage_transport carrier=%s", backend)
        return backend

    def _disconnect(self, reason: str) -> None:
        self._open = False
        self._steps.end(reason)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    async def _close(self, reason: str) -> None:
        self._disconnect(reason)
        if not ray.is_initialized():
            self._stages.clear()
            return
        stages = list(self._stages.values())
        for index in list(self._stages):
            await self._drop(index)
        try:
            async with asyncio.timeout(DEATH_TIMEOUT_S):
                await asyncio.gather(*map(_gone, stages))
        except TimeoutError:
            logger.warning("event=stages_linger seconds=%s", DEATH_TIMEOUT_S)


async def _gone(stage: ActorHandle) -> None:
    """Wait until a worker that was killed does not answer any more; it may, for a moment."""
    with contextlib.suppress(RayError):
        while True:
            settling: Any = stage.settle.remote(0.0)
            await settling
            await asyncio.sleep(DEATH_POLL_S)


def _seconds_left(limit: asyncio.Timeout) -> float:
    deadline = limit.when()
    assert deadline is not None
    return max(deadline - asyncio.get_running_loop().time(), 0.0)


def _free_resources() -> str:
    """What Ray has to give now."""
    free = ray.available_resources()
    return f"{free.get('CPU', 0.0):g}cpu,{free.get('GPU', 0.0):g}gpu"
