"""Where an engine's stages and drafters run: here, in child processes, or in Ray actors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..cluster.assembly import local_pipeline
from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.drafter_factory import build_drafter
from ..cluster.drafter_link import DrafterLink
from ..cluster.grpc_link import GrpcLink, GrpcOptions
from ..cluster.inproc_link import InprocLink
from ..cluster.pipeline import Pipeline, StageSpec
from ..core.errors import ConfigError

# A drafter that is started here first imports its libraries and loads its model or store.
SPAWN_TIMEOUT_S = 60.0


class Placement:
    """Starts what an engine's settings ask for, and ends it at `close`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._group: Any = _current_placement_group() if config.backend == "ray" else None
        self._actors: list[Any] = []
        self._stops: list[Callable[[], None]] = []

    def make_pipeline(self, specs: Sequence[StageSpec]) -> Pipeline:
        """A pipeline over these stages, not started. Raises `CheckpointError`."""
        if self._config.backend == "local":
            return local_pipeline(specs)
        # Ray takes seconds to import, which local engines need not wait for.
        from ..actors.stage_actor import spawn_stage  # noqa: PLC0415
        from ..cluster.ray_pipeline import RayPipeline  # noqa: PLC0415

        _ensure_ray()
        return RayPipeline(
            specs,
            spawn_stage,
            transport=self._config.stage_transport,
            placement_group=self._group,
            max_step_rows=self._config.max_num_batched_tokens,
        )

    async def make_links(self) -> list[DrafterLink]:
        """A link to every drafter, in order; what runs beside the engine is started.

        Raises `ConfigError`, `CheckpointError`, `StoreError` for settings that cannot work.
        """
        drafters = enumerate(self._config.drafters)
        return [await self._link(index, drafter) for index, drafter in drafters]

    def close(self) -> None:
        """End drafter processes and actors; twice is once."""
        for stop in self._stops:
            stop()
        self._stops.clear()
        self._actors.clear()

    async def _link(self, index: int, drafter: DrafterConfig) -> DrafterLink:
        if drafter.transport == "inproc":
            try:
                return InprocLink(build_drafter(drafter, self._config), drafter.max_nodes)
            except ConfigError as error:
                raise ConfigError(f"drafters[{index}].{error.field}", error.message) from error
        if drafter.address is not None:
            return GrpcLink(drafter.source, drafter.address, max_nodes=drafter.max_nodes)
        options = GrpcOptions(connect_timeout_s=SPAWN_TIMEOUT_S)
        address = await self._spawn(drafter)
        return GrpcLink(drafter.source, address, options, max_nodes=drafter.max_nodes)

    async def _spawn(self, drafter: DrafterConfig) -> Callable[[], Awaitable[str]]:
        """Start a drafter server; where to find it, also after it died and came back."""
        if self._config.backend == "local":
            from ..actors.drafter_process import DrafterProcess  # noqa: PLC0415

            process = DrafterProcess(drafter, self._config)
            self._stops.append(process.stop)
            return process.address
        from ..actors.drafter_actor import spawn_drafter  # noqa: PLC0415

        _ensure_ray()
        actor, address = spawn_drafter(drafter, self._config, placement_group=self._group)
        self._actors.append(actor)
        return address


def _ensure_ray() -> None:
    import ray  # noqa: PLC0415

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)


def _current_placement_group() -> Any:
    """The group of the Ray actor that this runs in; None elsewhere."""
    import ray  # noqa: PLC0415

    return ray.util.get_current_placement_group() if ray.is_initialized() else None
