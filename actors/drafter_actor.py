"""A Ray actor that hosts a drafter server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ..cluster.bundle import Bundle, strategy_of
from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.links.tokens import Access, new_token
from ..cluster.loop_calls import in_daemon_thread
from ..cluster.tls_files import TlsFiles
from ..core.errors import DrafterError, DraftlineError

if TYPE_CHECKING:
    from ..core.drafter import Drafter
    from .drafter_server import DrafterServer


# Ray starts a dead actor anew, without limit: a drafter's state comes back by re-opening requests.
@ray.remote(max_restarts=-1, max_task_retries=0)
class DrafterActor:
    """Serves the drafter of `config` on this node's address, to those that show `token`."""

    def __init__(self, config: DrafterConfig, token: str, engine: EngineConfig | None) -> None:
        self._config, self._engine = config, engine
        self._access = Access.single(token)
        self._host = ray.util.get_node_ip_address()
        self._server: DrafterServer | None = None
        self._port: int | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> str:
        """host:port, listening. Raises what `build_drafter` raises."""
        # Not in the constructor, whose errors Ray reports as text only.
        async with self._starting:
            if self._port is None:
                drafter = await asyncio.to_thread(_build, self._config, self._engine)
                # Whoever only starts the actor needs neither.
                from .drafter_server import DrafterServer  # noqa: PLC0415

                self._server = DrafterServer(
                    drafter, self._host, tls=actor_tls(self._config), access=self._access
                )
                self._port = await self._server.start()
        return f"{self._host}:{self._port}"


def _build(config: DrafterConfig, engine: EngineConfig | None) -> Drafter:
    from ..cluster.drafter_factory import build_drafter  # noqa: PLC0415

    return build_drafter(config, engine)


class RayDrafter:
    """An actor that serves a drafter, and where a `GrpcLink` finds it.

    actor  the handle, which keeps it alive
    token  that its calls must show
    """

    def __init__(self, actor: ActorHandle, token: str) -> None:
        self.actor = actor
        self.token = token

    async def address(self) -> str:
        """host:port, listening; after a restart the new one, once the actor is back.

        Raises what `build_drafter` raises, and `DrafterError` if the actor is lost.
        """
        actor: Any = self.actor
        try:
            return await actor.address.remote()
        except RayTaskError as error:
            if isinstance(error.cause, DraftlineError):
                raise error.cause from None
            raise DrafterError(str(error)) from error
        except RayError as error:
            raise DrafterError(str(error)) from error

    async def replace(self) -> None:
        """End a process that does not answer; Ray starts another."""
        # It waits for Ray's head, which may be busy with the same fault.
        await in_daemon_thread(lambda: ray.kill(self.actor, no_restart=False))


def spawn_drafter(
    config: DrafterConfig,
    engine: EngineConfig | None = None,
    *,
    token: str | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    bundle: Bundle | None = None,
) -> RayDrafter:
    """Start the actor; without a `token` it gets one of its own."""
    token = token or new_token()
    actor: Any = DrafterActor.options(
        num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=strategy_of(bundle)
    ).remote(config, token, engine)
    return RayDrafter(actor, token)


def actor_tls(config: DrafterConfig) -> TlsFiles | None:
    """The certificates that an actor serves with: where authority, certificate and key are given.

    Its clients need a certificate then, too.
    """
    files = config.tls_files
    if files is None or None in (files.ca, files.certificate, files.key):
        return None
    return files
