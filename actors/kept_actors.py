"""Clients of a `Supervisor`, which runs in the coordinator's process or in an actor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.pipeline.bundle import Bundle, at_node, node_of
from ..cluster.pipeline.supervisor import Holder, Taken, Wanted, key_of
from ..cluster.transport.stage_spec import StageSpec
from ..core.errors import StageLost
from .drafter_actor import DrafterActor, RayDrafter
from .stage_actor import spawn_beside, spawn_stage
from .supervisor_actor import new_supervisor

logger = logging.getLogger(__name__)

# Ray Serve restarts a dead supervisor after three health checks, ten seconds apart.
SUPERVISOR_TIMEOUT_S = 60.0
SUPERVISOR_PAUSE_S = 0.5


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
