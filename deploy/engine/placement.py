"""Where an engine's stages and drafters run: here, in child processes, or in Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...cluster.config import HEAD, DrafterConfig, EngineConfig
from ...cluster.drafting.factory import build_drafter, keeps_answers
from ...cluster.drafting.hub import AnyDrafter
from ...cluster.drafting.local_drafter import LocalDrafter, StageDrafts
from ...cluster.drafting.options import features_of_target, is_in_last_stage
from ...cluster.drafting.pool import DrafterPool, MemberFinder
from ...cluster.engine.assembly import local_pipeline
from ...cluster.links.access import drafter_tls, new_token, read_token
from ...cluster.links.grpc_link import AddressProvider, GrpcLink, GrpcOptions
from ...cluster.links.link import DrafterLink
from ...cluster.transport.stage_spec import Pipeline, StageSpec
from ...core.errors import ConfigError, DrafterError, DraftlineError
from ...core.progress import Progress, unseen
from ...core.proposals import FeatureLayers

if TYPE_CHECKING:
    from ...actors.drafter_actor import RayDrafter
    from ...actors.drafter_process import DrafterProcess
    from ...actors.kept_actors import SupervisorClient
    from ...cluster.pipeline.bundle import Bundle

# A drafter that is started here first imports its libraries and loads its model or store. The
# first time its model may come from a slow disk; later, requests wait for nothing.
START_TIMEOUT_S = 310.0
RESTART_TIMEOUT_S = 65.0


class Placement:
    """Starts the stages and drafters of an engine's settings; `close` ends them."""

    def __init__(
        self,
        config: EngineConfig,
        supervisor: SupervisorClient | None = None,
        progress: Progress = unseen,
    ) -> None:
        """`supervisor` lends stages and drafters that outlive this engine; without one none do.
        `progress` shows the loading of weights in this process.
        """
        self._config = config
        self._supervisor = supervisor
        self._progress = progress
        # Shown to the drafter servers that are started here, and known to no other process.
        self._token = new_token()
        self._bundles = _bundles(config) if config.backend == "ray" else None
        self._actors: list[Any] = []
        self._stops: list[Callable[[], None]] = []
        # Set by `make_drafters`.
        self._features: FeatureLayers | None = None

    def make_pipeline(self, specs: Sequence[StageSpec]) -> Pipeline:
        """A pipeline over these stages, not started. Raises `CheckpointError`."""
        if self._config.backend == "local":
            return local_pipeline(specs, self._progress)
        # Ray takes seconds to import, which local engines need not wait for.
        from ...actors.kept_actors import KeptStages, LocalSupervisor  # noqa: PLC0415
        from ...cluster.pipeline.ray_pipeline import RayPipeline  # noqa: PLC0415

        has_gpus = any(spec.num_gpus for spec in specs)
        supervisor = None if has_gpus else self._supervisor
        if supervisor is None:
            supervisor = LocalSupervisor(0 if has_gpus else self._config.standby_stages)
            self._stops.append(supervisor.close)
        return RayPipeline(
            specs,
            KeptStages(supervisor, self._bundles and self._bundles[: len(specs)]),
            transport=self._config.stage_transport,
        )

    async def make_drafters(self) -> list[AnyDrafter]:
        """Every drafter in order, or a client of it; starts drafter servers.

        Raises `ConfigError` that names the drafter if one cannot start, wherever it runs.
        """
        drafters: list[AnyDrafter] = []
        starts = []
        self._features = features_of_target(self._config)
        for index, drafter in enumerate(self._config.drafters_with_defaults):
            if drafter.transport == "inproc":
                with _naming(index):
                    # A head of the last stage is loaded there.
                    built = (
                        StageDrafts(drafter.source)
                        if is_in_last_stage(drafter)
                        else build_drafter(drafter, self._config)
                    )
                drafters.append(LocalDrafter(built, **self._client_options(drafter)))
            elif drafter.address is not None:
                with _naming(index):
                    drafters.append(self._running_servers(drafter))
            elif drafter.drafter_pool is not None:
                with _naming(index):
                    drafters.append(self._ray_serve_pool(drafter, drafter.drafter_pool))
            else:
                spawned = [await self._spawn(drafter) for _ in range(drafter.servers)]
                drafters.append(self._pooled(drafter, [client for client, _ in spawned]))
                starts.extend(_start(index, address) for _, address in spawned)
        # Side by side, since each imports its libraries and loads its model or store.
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        return drafters

    def close(self) -> None:
        """End drafter processes and actors; a second call does nothing."""
        for stop in self._stops:
            stop()
        self._stops.clear()
        self._actors.clear()
        if self._supervisor is not None:
            self._supervisor.close()

    async def _spawn(self, drafter: DrafterConfig) -> tuple[GrpcLink, AddressProvider]:
        """A client of a drafter server, and a function that returns the server's address.

        The function starts the server, also after it died. A server that does not answer is
        replaced.
        """
        tls = None
        if self._config.backend == "ray":
            from ...actors.drafter_actor import actor_tls  # noqa: PLC0415

            tls = actor_tls(drafter)
        server = await self._start_server(drafter)
        options = GrpcOptions(address_timeout_s=RESTART_TIMEOUT_S, tls=tls, token=server.token)
        client = GrpcLink(
            drafter.source,
            server.address,
            options,
            replace=server.replace,
            **self._client_options(drafter),
        )
        return client, server.address

    def _running_servers(self, drafter: DrafterConfig) -> AnyDrafter:
        """Clients of servers that run already. Raises `ConfigError` for their credentials."""
        options = _options_of_other(drafter)
        clients = [
            GrpcLink(drafter.source, address, options, **self._client_options(drafter))
            for address in drafter.addresses
        ]
        return self._pooled(drafter, clients)

    def _ray_serve_pool(self, drafter: DrafterConfig, application: str) -> DrafterPool:
        """A pool over the servers of a Ray Serve application. Raises `ConfigError`."""
        # Ray takes seconds to import, which other engines need not wait for.
        from ...actors.pool_members import PoolMember, ServeMembers, join_cluster  # noqa: PLC0415

        options = _options_of_other(drafter)

        def client_of(member: PoolMember) -> GrpcLink:
            return GrpcLink(
                drafter.source,
                member.address,
                replace(options, token=member.token),
                **self._client_options(drafter),
            )

        join_cluster()
        return self._pool(drafter, {}, ServeMembers(application, client_of))

    def _pooled(self, drafter: DrafterConfig, clients: Sequence[GrpcLink]) -> AnyDrafter:
        """The only client, or a pool of several."""
        if len(clients) == 1:
            return clients[0]
        return self._pool(drafter, {str(number): one for number, one in enumerate(clients)})

    def _pool(
        self,
        drafter: DrafterConfig,
        clients: dict[str, DrafterLink],
        finder: MemberFinder | None = None,
    ) -> DrafterPool:
        options = self._client_options(drafter)
        return DrafterPool(
            drafter.source,
            options["max_nodes"],
            options["keeps_answers"],
            clients,
            finder,
            reads_features=options["features"] is not None,
        )

    def _client_options(self, drafter: DrafterConfig) -> dict[str, Any]:
        """Arguments of a drafter's client that do not depend on where the drafter runs."""
        return {
            "max_nodes": drafter.max_nodes,
            "keeps_answers": keeps_answers(drafter),
            "features": self._features if drafter.kind == HEAD else None,
        }

    async def _start_server(self, drafter: DrafterConfig) -> DrafterProcess | RayDrafter:
        if self._config.backend == "local":
            from ...actors.drafter_process import DrafterProcess  # noqa: PLC0415

            process = DrafterProcess(drafter, self._config, self._token)
            self._stops.append(process.stop)
            return process
        from ...actors.drafter_actor import spawn_drafter  # noqa: PLC0415

        index = self._config.pipeline_parallel_size + len(self._actors)
        bundle = self._bundles[index] if self._bundles else None
        if self._supervisor is not None and not self._config.gpus_per_drafter:
            from ...actors.kept_actors import take_drafter  # noqa: PLC0415

            server = await take_drafter(
                self._supervisor, drafter, self._config, self._token, bundle
            )
        else:
            server = spawn_drafter(
                drafter,
                self._config,
                token=self._token,
                num_cpus=self._config.cpus_per_drafter,
                num_gpus=self._config.gpus_per_drafter,
                bundle=bundle,
            )
        self._actors.append(server.actor)
        return server


def _options_of_other(drafter: DrafterConfig) -> GrpcOptions:
    """How to reach a server of others. Raises `ConfigError` for its credentials."""
    token = read_token(drafter.token_env, drafter.token_file)
    tls = drafter_tls(drafter)
    if tls is not None:
        # What cannot be read is the user's error now, not a drafter that fails again and again.
        tls.channel_credentials()
    return GrpcOptions(tls=tls, token=token)


async def _start(index: int, address: AddressProvider) -> None:
    """Wait until a drafter server listens."""
    with _naming(index):
        try:
            await asyncio.wait_for(address(), START_TIMEOUT_S)
        except TimeoutError:
            raise DrafterError(f"did not start within {START_TIMEOUT_S:.0f} s") from None


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Turn an error at a drafter's start into a `ConfigError` that names the drafter."""
    field = f"drafters[{index}]"
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{field}.{error.field}", error.message) from error
    except DraftlineError as error:
        raise ConfigError(field, str(error)) from error


def stages_have_gpu(config: EngineConfig) -> bool | None:
    """Whether a GPU is where the stages will run; None: as torch sees it here.

    Actors may run on other machines, so Ray is asked. `cuda` is not checked there, because
    a cluster may still grow.
    """
    if config.backend == "local":
        return None
    # Ray takes seconds to import, which local engines need not wait for.
    from ...cluster.pipeline.bundle import cluster_has_gpus  # noqa: PLC0415

    return True if config.device == "cuda" else cluster_has_gpus()


def ensure_ray(config: EngineConfig) -> None:
    """Connect this process to Ray where stages and drafters are its actors.

    To be called in a thread that outlives the engine's. Ray's state cannot be read any more once
    the thread that connected has ended: the next engine would wait for it until Ray ends the
    process.
    """
    if config.backend == "local":
        return
    import ray  # noqa: PLC0415

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)


def _bundles(config: EngineConfig) -> list[Bundle] | None:
    """Places of stages and drafters in the group of the Ray actor that this runs in, if any."""
    import ray  # noqa: PLC0415

    group = ray.util.get_current_placement_group() if ray.is_initialized() else None
    if group is None:
        return None
    # Ray takes seconds to import, which local engines need not wait for.
    from ...cluster.pipeline.bundle import replica_bundles  # noqa: PLC0415

    num_drafters = sum(drafter.servers for drafter in config.drafters if drafter.is_spawned)
    return replica_bundles(group, config.pipeline_parallel_size, num_drafters)
