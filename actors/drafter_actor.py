"""A Ray actor that hosts a drafter server."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ..cluster.bundle import Bundle, strategy_of
from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.drafter_factory import build_drafter
from ..cluster.grpc_link import AddressProvider
from ..core.errors import DrafterError, DraftlineError
from .drafter_server import DrafterServer


# Ray starts a dead actor anew, without limit: a drafter's state comes back by re-opening requests.
@ray.remote(max_restarts=-1, max_task_retries=0)
class DrafterActor:
    """Serves the drafter of `config` on this node's address."""

    def __init__(self, config: DrafterConfig, engine: EngineConfig | None = None) -> None:
        self._config, self._engine = config, engine
        self._host = ray.util.get_node_ip_address()
        self._server: DrafterServer | None = None
        self._port: int | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> str:
        """host:port, listening. Raises what `build_drafter` raises."""
        # Not in the constructor, whose errors Ray reports as text only.
        async with self._starting:
            if self._port is None:
                drafter = await asyncio.to_thread(build_drafter, self._config, self._engine)
                self._server = DrafterServer(drafter, self._host)
                self._port = await self._server.start()
        return f"{self._host}:{self._port}"


def spawn_drafter(
    config: DrafterConfig,
    engine: EngineConfig | None = None,
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    bundle: Bundle | None = None,
) -> tuple[ActorHandle, AddressProvider]:
    """Start the actor; the handle keeps it alive, the provider tells a `GrpcLink` where it is.

    After a restart the provider gives the new address, once the actor is back. It raises what
    `build_drafter` raises, and `DrafterError` if the actor is lost.
    """
    actor: Any = DrafterActor.options(
        num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=strategy_of(bundle)
    ).remote(config, engine)

    async def address() -> str:
        try:
            return await actor.address.remote()
        except RayTaskError as error:
            if isinstance(error.cause, DraftlineError):
                raise error.cause from None
            raise DrafterError(str(error)) from error
        except RayError as error:
            raise DrafterError(str(error)) from error

    return actor, address
