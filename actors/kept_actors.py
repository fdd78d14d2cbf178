"""Clients of a `Keeper`, which runs in the coordinator's process or in an actor."""

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
from ..cluster.pipeline.keeper import Holder, Taken, Wanted, key_of
from ..cluster.pipeline.ray_pipeline import TakenStage
from ..cluster.transport.stage_spec import StageSpec
from ..core.errors import StageLost
from .drafter_actor import DrafterActor, RayDrafter
from .keeper_actor import new_keeper
from .stage_actor import spawn_beside, spawn_stage

logger = logging.getLogger(__name__)

# Ray Serve restarts a dead keeper after three health checks, ten seconds apart.
KEEPER_TIMEOUT_S = 60.0
KEEPER_PAUSE_S = 0.5


class KeeperClient(Protocol):
    """The actors of one coordinator."""

    # Whether actors outlive this coordinator. Such actors reserve no resources themselves.
    is_lasting: bool

    async def take(self, wanted: Wanted) -> Taken:
        """See `Keeper`."""
        ...

    async def drop(self, actor: Any) -> None:
        """See `Keeper`."""
        ...

    def replenish(self) -> None:
        """See `Keeper`."""
        ...

    def close(self) -> None:
        """End the actors that only this coordinator can use."""
        ...


class OwnKeeper:
    """Actors that end with this process."""

    is_lasting = False

    def __init__(self, num_spares: int = 0) -> None:
        self._keeper = new_keeper(num_spares)
        self._holder = Holder("this process")

    async def take(self, wanted: Wanted) -> Taken:
        """See `KeeperClient`."""
        return await self._keeper.take(self._holder, wanted)

    async def drop(self, actor: Any) -> None:
        """See `KeeperClient`."""
        self._keeper.drop(actor)

    def replenish(self) -> None:
        """See `KeeperClient`."""
        self._keeper.replenish()

    def close(self) -> None:
        """See `KeeperClient`."""
        self._keeper.close()


class DeploymentKeeper:
    """Actors of a keeper that outlives this coordinator (`KeeperActor`).

    find    looks up the keeper's handle, which changes with a restart. Raises `ValueError` while
            there is none
    holder  this coordinator
    """

    is_lasting = True

    def __init__(self, find: Callable[[], ActorHandle], holder: Holder) -> None:
        self._find = find
        self._holder = holder
        self._actors: list[Any] = []

    async def take(self, wanted: Wanted) -> Taken:
        """See `KeeperClient`. Raises `StageLost` if the keeper does not come back."""
        deadline = time.monotonic() + KEEPER_TIMEOUT_S
        while True:
            try:
                keeper: Any = self._find()
                taken: Taken = await keeper.take.remote(self._holder, wanted)
            except (ValueError, RayActorError) as error:
                if time.monotonic() > deadline:
                    raise StageLost(f"the keeper of the stages is gone: {error}") from error
                await asyncio.sleep(KEEPER_PAUSE_S)
            else:
                self._actors.append(taken.actor)
                return taken

    async def drop(self, actor: Any) -> None:
        """See `KeeperClient`."""
        self._drop(actor)

    def replenish(self) -> None:
        """See `KeeperClient`."""
        self._tell(lambda keeper: keeper.replenish.remote())

    def close(self) -> None:
        """See `KeeperClient`: a coordinator that ends normally has no successor."""
        for actor in list(self._actors):
            self._drop(actor)

    def _drop(self, actor: Any) -> None:
        self._actors = [one for one in self._actors if one != actor]
        if ray.is_initialized():
            ray.kill(actor)
            self._tell(lambda keeper: keeper.drop.remote(actor))

    def _tell(self, call: Callable[[Any], object]) -> None:
        try:
            call(self._find())
        except (ValueError, RayError) as error:
            logger.info("event=keeper_out_of_reach reason=%r", str(error))


async def take_drafter(
    keeper: KeeperClient,
    config: DrafterConfig,
    engine: EngineConfig,
    token: str,
    bundle: Bundle | None,
) -> RayDrafter:
    """A drafter's actor from the keeper; a reused actor has the token of its first coordinator."""
    node = None if bundle is None else node_of(bundle)
    wanted = Wanted(
        key=key_of(f"drafter-{config.kind}", config, engine),
        node=node,
        spawn=partial(spawn_drafter_beside, config, engine, token, node),
        note=token,
    )
    taken = await keeper.take(wanted)
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

    def __init__(self, keeper: KeeperClient, bundles: list[Bundle] | None = None) -> None:
        self._keeper = keeper
        self._bundles = bundles

    async def take(self, index: int, spec: StageSpec) -> TakenStage:
        """See `StageSource`."""
        bundle = self._bundles[index] if self._bundles else None
        node = None if bundle is None else node_of(bundle)
        if self._keeper.is_lasting:
            spawn = partial(spawn_beside, node)
        else:
            spawn = partial(spawn_stage, spec.num_cpus, spec.num_gpus, bundle)
        wanted = Wanted(
            key=key_of(f"stage-{index}", spec),
            node=node,
            spawn=spawn,
            may_be_spare=spec.num_gpus == 0,
        )
        taken = await self._keeper.take(wanted)
        return TakenStage(taken.actor, taken.is_kept)

    async def drop(self, worker: ActorHandle) -> None:
        """See `StageSource`."""
        await self._keeper.drop(worker)

    def replenish(self) -> None:
        """See `StageSource`."""
        self._keeper.replenish()
