"""A pipeline whose stages are Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, assert_never

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from ..core.errors import DraftlineError, StageLost
from ..core.types import StepInput, StepOutput
from .bundle import Bundle
from .compiled_graph_transport import CompiledGraphTransport
from .config import TransportName
from .distributed_transport import DistributedTransport
from .in_flight import InFlightSteps
from .loop_calls import call_on_loop
from .pipeline import StageSpec
from .stage_place import StagePlace, check_nccl, fastest_carrier
from .stage_transport import StageTransport

logger = logging.getLogger(__name__)

Spawn = Callable[[int, StageSpec, Bundle | None], ActorHandle]

DEATH_TIMEOUT_S = 3.0


class RayPipeline:
    """Runs each stage in an actor of its own; several steps are under way at once.

    spawn            starts the actor of a stage (`actors/stage_actor.py`)
    transport        `auto` is `nccl` where every stage has a GPU of its own, else `distributed`,
                     which is faster than `compiled_graph` by measurement (docs/decisions.md)
    bundles          where each stage's actor goes; without them Ray chooses
    max_in_flight    default: one more than stages, so that no stage waits for the coordinator
    max_step_rows    rows of the largest step, for the size of shared-memory buffers
    start_timeout_s  loading the model included

    Needs a Ray that is initialised. `restart` brings a pipeline with a dead stage back.
    """

    def __init__(  # noqa: PLR0913 - all but two are keywords with defaults
        self,
        specs: Sequence[StageSpec],
        spawn: Spawn,
        *,
        transport: TransportName = "auto",
        bundles: Sequence[Bundle] | None = None,
        max_in_flight: int | None = None,
        max_step_rows: int = 512,
        start_timeout_s: float = 600.0,
    ) -> None:
        assert specs, "a pipeline has at least one stage"
        self._specs = tuple(specs)
        self._spawn = spawn
        self._transport_name: TransportName = transport
        self._bundles: Sequence[Bundle | None] = bundles or [None] * len(specs)
        self._max_in_flight = max_in_flight or len(specs) + 1
        self._max_step_rows = max_step_rows
        self._start_timeout_s = start_timeout_s
        self._lifecycle = asyncio.Lock()
        self._stages: list[ActorHandle] = []
        self._deaths: list[Future[Any]] = []
        self._transport: StageTransport | None = None
        self._steps = InFlightSteps(self._max_in_flight)
        self._open = False
        self._num_blocks = 0

    @property
    def num_stages(self) -> int:
        """See `Pipeline`."""
        return len(self._specs)

    @property
    def max_in_flight(self) -> int:
        """See `Pipeline`."""
        return self._max_in_flight

    @property
    def num_blocks(self) -> int:
        """See `Pipeline`."""
        return self._num_blocks

    async def start(self) -> None:
        """See `Pipeline`; raises what the stages' builds raised, such as `CheckpointError`."""
        async with self._lifecycle:
            assert not self._stages, "the pipeline is open already"
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await self._start()
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

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """See `Pipeline`."""
        steps = self._steps
        if steps.lost.is_set() or not self._open:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(steps.error())
            return future
        assert self._transport is not None
        sequence, future = steps.add()
        self._transport.send(sequence, step)
        return future

    async def close(self) -> None:
        """See `Pipeline`; takes less than 10 seconds whatever the stages do."""
        async with self._lifecycle:
            await self._close("the pipeline was closed")

    async def restart(self) -> None:
        """Replace all stages by new ones with empty KV caches; unanswered steps end."""
        await self.close()
        await self.start()

    async def _start(self) -> None:
        self._steps = steps = InFlightSteps(self._max_in_flight)
        for index, (spec, bundle) in enumerate(zip(self._specs, self._bundles, strict=True)):
            stage = self._spawn(index, spec, bundle)
            self._stages.append(stage)
            self._deaths.append(_watch(stage, index, steps))
        builds = [stage.build.remote() for stage in self._stages]
        places: list[StagePlace] = await asyncio.gather(*builds)
        counts = [stage.num_blocks.remote() for stage in self._stages]
        self._num_blocks = min(await asyncio.gather(*counts))
        self._transport = self._new_transport(places)
        await _unless_lost(self._transport.open(self._stages, steps), steps)
        self._open = True

    def _new_transport(self, places: Sequence[StagePlace]) -> StageTransport:
        match self._transport_name:
            case "auto":
                carrier = fastest_carrier(places)
                logger.info("event=stage_transport carrier=%s", carrier)
                return DistributedTransport(places, carrier, self._max_in_flight)
            case "nccl":
                check_nccl(places)
                return DistributedTransport(places, "nccl", self._max_in_flight)
            case "distributed":
                return DistributedTransport(places, "gloo", self._max_in_flight)
            case "compiled_graph":
                widest = max(spec.hidden_size for spec in self._specs)
                # Four bytes a number, and some more for the step itself.
                buffer_bytes = self._max_step_rows * widest * 4 + (1 << 18)
                return CompiledGraphTransport(buffer_bytes, self._max_in_flight)
            case _:
                assert_never(self._transport_name)

    async def _close(self, reason: str) -> None:
        self._open = False
        self._steps.end(reason)
        stages, self._stages = self._stages, []
        deaths, self._deaths = self._deaths, []
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()
        if ray.is_initialized():
            for stage in stages:
                ray.kill(stage)
        if deaths and ray.is_initialized():
            gone = asyncio.gather(*map(asyncio.wrap_future, deaths), return_exceptions=True)
            try:
                await asyncio.wait_for(gone, DEATH_TIMEOUT_S)
            except TimeoutError:
                logger.warning("event=stages_linger seconds=%s", DEATH_TIMEOUT_S)


def _watch(stage: ActorHandle, index: int, steps: InFlightSteps) -> Future[Any]:
    """A future that fails when the stage's process dies; `steps` hears of it too."""
    loop = asyncio.get_running_loop()
    death = stage.watch.remote().future()

    def died(death: Future[Any]) -> None:
        if not death.cancelled():
            reason = f"stage {index} is dead: {type(death.exception()).__name__}"
            call_on_loop(loop, steps.lose, reason)

    death.add_done_callback(died)
    return death


async def _unless_lost(opening: Coroutine[Any, Any, None], steps: InFlightSteps) -> None:
    """Wait for the transport, which may never open once a stage is dead."""
    task = asyncio.ensure_future(opening)
    lost = asyncio.ensure_future(steps.lost.wait())
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if steps.lost.is_set():
            raise steps.error()
        task.result()
    finally:
        task.cancel()
        lost.cancel()
