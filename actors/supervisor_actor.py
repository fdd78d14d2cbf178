"""The supervisor as an actor of a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from ..cluster.pipeline.supervisor import Holder, Supervisor, Taken, Wanted
from .stage_actor import spawn_beside

# An actor that does not answer within this time counts as alive.
PROBE_TIMEOUT_S = 1.0
TEND_PERIOD_S = 5.0


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
