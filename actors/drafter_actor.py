"""A Ray actor that hosts a drafter server."""

from __future__ import annotations

import asyncio
import time
from asyncio import FIRST_COMPLETED
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.links.access import Access, TlsFiles, drafter_tls, new_token
from ..cluster.links.grpc_link import NoAnswer
from ..cluster.loop_calls import in_daemon_thread
from ..cluster.pipeline.bundle import Bundle, strategy_of
from ..cluster.transport.stage_spec import end_process
from ..core.errors import DrafterError, DraftlineError

if TYPE_CHECKING:
    from ..core.interfaces import Drafter
    from .drafter_server import DrafterServer

# Timeouts for a running actor and for a starting one, whose process first imports the drafter's
# libraries.
PING_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0


# Ray restarts a dead actor without limit; re-opened requests restore the drafter's state.
@ray.remote(max_restarts=-1, max_task_retries=0)
class DrafterActor:
    """Serves the drafter of `config` on this node's address; calls must carry `token`."""

    def __init__(self, config: DrafterConfig, token: str, engine: EngineConfig | None) -> None:
        self._config, self._engine = config, engine
        self._access = Access(token)
        self._host = ray.util.get_node_ip_address()
        self._server: DrafterServer | None = None
        self._port: int | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> str:
        """host:port, listening. Raises what `build_drafter` raises."""
        # Not in the constructor: Ray reports its errors only as text.
        async with self._starting:
            if self._port is None:
                drafter = await asyncio.to_thread(_build, self._config, self._engine)
                # Local imports: a process that only starts the actor needs neither module.
                from .drafter_server import DrafterServer  # noqa: PLC0415

                self._server = DrafterServer(
                    drafter,
                    self._host,
                    tls=actor_tls(self._config),
                    access=self._access,
                    on_device_lost=end_process,
                )
                self._port = await self._server.start()
        return f"{self._host}:{self._port}"

    async def ping(self) -> None:
        """Answers at once, also while the drafter is loaded."""


def _build(config: DrafterConfig, engine: EngineConfig | None) -> Drafter:
    from ..cluster.drafting.factory import build_drafter  # noqa: PLC0415

    return build_drafter(config, engine)


class RayDrafter:
    """An actor that serves a drafter, and its address for a `GrpcLink`.

    actor  the handle, which keeps it alive
    token  that calls must carry
    """

    def __init__(self, actor: ActorHandle, token: str) -> None:
        self.actor = actor
        self.token = token
        self._starts_until = 0.0
        self._expect_start()

    async def address(self) -> str:
        """host:port, listening; after a restart the new one, once the actor is back.

        Raises the errors of `build_drafter`, `DrafterError` if the actor is lost, and `NoAnswer` if
        it does not respond.
        """
        try:
            address = await self._ask()
        except RayTaskError as error:
            if isinstance(error.cause, DraftlineError):
                raise error.cause from None
            raise DrafterError(str(error)) from error
        except RayError as error:
            self._expect_start()
            raise DrafterError(str(error)) from error
        self._starts_until = 0.0
        return address

    async def replace(self) -> None:
        """End an unresponsive process; Ray starts another."""
        self._expect_start()
        # This call waits for Ray's head node, which may be busy with the same fault.
        await in_daemon_thread(lambda: ray.kill(self.actor, no_restart=False))

    def _expect_start(self) -> None:
        self._starts_until = time.monotonic() + START_TIMEOUT_S

    async def _ask(self) -> str:
        actor: Any = self.actor
        address = asyncio.ensure_future(_result(actor.address.remote()))
        ping = asyncio.ensure_future(_result(actor.ping.remote()))
        timeout_s = max(PING_TIMEOUT_S, self._starts_until - time.monotonic())
        try:
            # A drafter may take minutes to load, but a ping shows at once whether its process is
            # alive.
            await asyncio.wait({address, ping}, timeout=timeout_s, return_when=FIRST_COMPLETED)
            if not (address.done() or ping.done()):
                raise NoAnswer(f"its actor said nothing for {timeout_s:.0f} s")
            return await address
        finally:
            for call in (address, ping):
                call.cancel()
            await asyncio.gather(address, ping, return_exceptions=True)


async def _result(reference: Any) -> Any:
    return await reference


def spawn_drafter(
    config: DrafterConfig,
    engine: EngineConfig | None = None,
    *,
    token: str | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    bundle: Bundle | None = None,
) -> RayDrafter:
    """Start the actor; without a `token`, a new one is generated."""
    token = token or new_token()
    actor: Any = DrafterActor.options(
        num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=strategy_of(bundle)
    ).remote(config, token, engine)
    return RayDrafter(actor, token)


def actor_tls(config: DrafterConfig) -> TlsFiles | None:
    """The TLS settings of an actor's server; requires authority, certificate and key.

    Its clients then need a certificate, too.
    """
    files = drafter_tls(config)
    if files is None or None in (files.ca, files.certificate, files.key):
        return None
    return files
