"""Actors of stages and drafters, and the supervisor that keeps them beyond their coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError

from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.pipeline.bundle import Bundle, at_node, node_of, strategy_of
from ..cluster.pipeline.supervisor import Holder, Supervisor, Taken, Wanted, key_of
from ..cluster.transport.stage_spec import StageSpec
from ..cluster.transport.stage_worker import StageWorker
from ..core.errors import StageLost
from .drafter_actor import DrafterActor, RayDrafter

StageActor = ray.remote(StageWorker)
# `serve` occupies a thread while the stage runs. The others keep `settle` responsive, and cover an
# old `serve` that has not ended yet.
NUM_THREADS = 3
# An actor that does not answer within this time counts as alive.
PROBE_TIMEOUT_S = 1.0
TEND_PERIOD_S = 5.0
logger = logging.getLogger(__name__)
# Ray Serve restarts a dead supervisor after three health checks, ten seconds apart.
SUPERVISOR_TIMEOUT_S = 60.0
SUPERVISOR_PAUSE_S = 0.5


def spawn_stage(num_cpus: float, num_gpus: float, bundle: Bundle | None = None) -> ActorHandle:
    """Start the actor of one stage, which reserves these resources."""
    stage: Any = StageActor.options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        scheduling_strategy=strategy_of(bundle),
        max_concurrency=NUM_THREADS,
    ).remote()
    return stage


def spawn_beside(node: str | None) -> ActorHandle:
    """Start a stage's actor without resources of its own, on this Ray node; None: Ray chooses.

    For stages with resources reserved elsewhere, and for spare workers.
    """
    stage: Any = StageActor.options(
        num_cpus=0, scheduling_strategy=at_node(node), max_concurrency=NUM_THREADS
    ).remote()
    return stage


class RayPort:
    """The supervisor's actors in Ray (`ActorPort`). They end with this process."""

    def spawn_spare(self, node: str) -> ActorHandle:
        """See `ActorPort`."""
        return spawn_beside(node)

    async def prepare(self, spare: Any) -> None:
        """See `ActorPort`."""
        await spare.prepare.remote()

    async def is_dead(self, actor: Any) -> bool:
        """See `ActorPort`."""
        try:
            await asyncio.wait_for(actor.__ray_ready__.remote(), PROBE_TIMEOUT_S)
        except ActorDiedError:
            return True
        except (TimeoutError, RayError):
            # Out of reach for now; the process may be busy or paused.
            return False
        return False

    def kill(self, actor: Any) -> None:
        """See `ActorPort`."""
        if ray.is_initialized():
            ray.kill(actor)


def new_supervisor(num_spares: int) -> Supervisor:
    """A supervisor whose spare workers wait on this node."""
    node = ray.get_runtime_context().get_node_id()
    return Supervisor(RayPort(), node, num_spares, time.monotonic)


class SupervisorServer:
    """Serves the coordinators of one deployment; Ray Serve stops it with the deployment.

    Its actors end with it, since Ray stops actors whose owner is gone.
    """

    def __init__(self, num_first: int, num_spares: int) -> None:
        """`num_first` spare workers import their libraries in parallel with the first
        coordinator."""
        self._supervisor = new_supervisor(num_spares)
        self._supervisor.replenish(num_first)
        self._tending = asyncio.ensure_future(self._tend())

    async def take(self, holder: Holder, wanted: Wanted) -> Taken:
        """See `Supervisor`."""
        return await self._supervisor.take(holder, wanted)

    async def drop(self, actor: Any) -> None:
        """See `Supervisor`."""
        self._supervisor.drop(actor)

    async def replenish(self) -> None:
        """See `Supervisor`."""
        self._supervisor.replenish()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_PERIOD_S)
            await self._supervisor.tend()


SupervisorActor = ray.remote(SupervisorServer)


class SupervisorClient(Protocol):
    """The actors of one coordinator."""

    # Whether actors outlive this coordinator. Such actors reserve no resources themselves.
    is_lasting: bool

    async def take(self, wanted: Wanted) -> Taken:
        """See `Supervisor`."""
        ...

    async def drop(self, actor: Any) -> None:
        """See `Supervisor`."""
        ...

    def replenish(self) -> None:
        """See `Supervisor`."""
        ...

    def close(self) -> None:
        """End the actors that only this coordinator can use."""
        ...


class LocalSupervisor:
    """Actors that end with this process."""

    is_lasting = False

    def __init__(self, num_spares: int = 0) -> None:
        self._supervisor = new_supervisor(num_spares)
        self._holder = Holder("this process")

    async def take(self, wanted: Wanted) -> Taken:
        """See `SupervisorClient`."""
        return await self._supervisor.take(self._holder, wanted)

    async def drop(self, actor: Any) -> None:
        """See `SupervisorClient`."""
        self._supervisor.drop(actor)

    def replenish(self) -> None:
        """See `SupervisorClient`."""
        self._supervisor.replenish()

    def close(self) -> None:
        """See `SupervisorClient`."""
        self._supervisor.close()


class DeploymentSupervisor:
    """Actors of a supervisor that outlives this coordinator (`SupervisorActor`).

    find    looks up the supervisor's handle, which a restart changes. Raises `ValueError` while
            there is none
    holder  this coordinator
    """

    is_lasting = True

    def __init__(self, find: Callable[[], ActorHandle], holder: Holder) -> None:
        self._find = find
        self._holder = holder
        self._actors: list[Any] = []

    async def take(self, wanted: Wanted) -> Taken:
        """See `SupervisorClient`. Raises `StageLost` if the supervisor does not come back."""
        deadline = time.monotonic() + SUPERVISOR_TIMEOUT_S
        while True:
            try:
                supervisor: Any = self._find()
                taken: Taken = await supervisor.take.remote(self._holder, wanted)
            except (ValueError, RayActorError) as error:
                if time.monotonic() > deadline:
                    raise StageLost(f"the supervisor of the stages is gone: {error}") from error
                await asyncio.sleep(SUPERVISOR_PAUSE_S)
            else:
                self._actors.append(taken.actor)
                return taken

    async def drop(self, actor: Any) -> None:
        """See `SupervisorClient`."""
        self._drop(actor)

    def replenish(self) -> None:
        """See `SupervisorClient`."""
        self._tell(lambda supervisor: supervisor.replenish.remote())

    def close(self) -> None:
        """See `SupervisorClient`: a coordinator that ends normally has no successor."""
        for actor in list(self._actors):
            self._drop(actor)

    def _drop(self, actor: Any) -> None:
        self._actors = [one for one in self._actors if one != actor]
        if ray.is_initialized():
            ray.kill(actor)
            self._tell(lambda supervisor: supervisor.drop.remote(actor))

    def _tell(self, call: Callable[[Any], object]) -> None:
        try:
            call(self._find())
        except (ValueError, RayError) as error:
            logger.info("event=supervisor_out_of_reach reason=%r", str(error))


async def take_drafter(
    supervisor: SupervisorClient,
    config: DrafterConfig,
    engine: EngineConfig,
    token: str,
    bundle: Bundle | None,
) -> RayDrafter:
    """A drafter's actor from the supervisor. A reused one has its first coordinator's token."""
    node = None if bundle is None else node_of(bundle)
    wanted = Wanted(
        key=key_of(f"drafter-{config.kind}", config, engine),
        node=node,
        spawn=partial(spawn_drafter_beside, config, engine, token, node),
        note=token,
    )
    taken = await supervisor.take(wanted)
    return RayDrafter(taken.actor, taken.note)


def spawn_drafter_beside(
    config: DrafterConfig, engine: EngineConfig, token: str, node: str | None
) -> ActorHandle:
    """Start a drafter's actor on this Ray node, without resources of its own."""
    actor: Any = DrafterActor.options(num_cpus=0, scheduling_strategy=at_node(node))
    return actor.remote(config, token, engine)


class KeptStages:
    """The stages of one coordinator (`StageSource`).

    bundles  the placement of each stage's resources; None: Ray chooses
    """

    def __init__(self, supervisor: SupervisorClient, bundles: list[Bundle] | None = None) -> None:
        self._supervisor = supervisor
        self._bundles = bundles

    async def take(self, index: int, spec: StageSpec) -> Taken:
        """See `StageSource`."""
        bundle = self._bundles[index] if self._bundles else None
        node = None if bundle is None else node_of(bundle)
        if self._supervisor.is_lasting:
            spawn = partial(spawn_beside, node)
        else:
            spawn = partial(spawn_stage, spec.num_cpus, spec.num_gpus, bundle)
        wanted = Wanted(
            key=key_of(f"stage-{index}", spec),
            node=node,
            spawn=spawn,
            may_be_spare=spec.num_gpus == 0,
        )
        return await self._supervisor.take(wanted)

    async def drop(self, worker: ActorHandle) -> None:
        """See `StageSource`."""
        await self._supervisor.drop(worker)

    def replenish(self) -> None:
        """See `StageSource`."""
        self._supervisor.replenish()
