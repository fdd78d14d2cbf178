"""The parts of a simulated engine over a cost profile, and its clock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...cluster.config import DrafterConfig, EngineConfig
from ...cluster.engine.assembly import MakePipeline
from ...cluster.engine.engine_time import EngineTime
from ...cluster.links.pool import AnyLink
from ...cluster.transport.stage_spec import Pipeline, StageSpec
from ...core.errors import ConfigError
from .cost_profile import SMALL_MODEL, CostProfile
from .draft_times import times_of
from .host_clock import HostClock, HostLoop
from .slowed_link import SlowedLink
from .slowed_pipeline import SlowedPipeline


class Simulation:
    """Makes the pipeline and the links of one engine, with the times of a profile.

    small_model    the profile's entry whose times small models use
    host_slowdown  processor seconds of the engine's own work here for each second there
    """

    def __init__(
        self, profile: CostProfile, small_model: str = SMALL_MODEL, host_slowdown: float = 1.0
    ) -> None:
        """Raises `ConfigError` if the profile has no such entry."""
        if small_model not in {SMALL_MODEL, *profile.drafters}:
            known = ", ".join(name for name in profile.drafters if name.startswith(SMALL_MODEL))
            raise ConfigError("small-model", f"{profile.name} has no {small_model!r}; has: {known}")
        self.profile = profile
        self._small_model = small_model
        self.clock = HostClock(host_slowdown)
        self.time = EngineTime(self.clock, self.clock, partial(HostLoop, self.clock))

    def config(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings, with the profile's stages; the real stage runs in this process."""
        return config.model_copy(update={"backend": "local", "pipeline_parallel_size": 1})

    def pipelines(self, _make_pipeline: MakePipeline) -> MakePipeline:
        """For `Replica`."""

        def make(specs: Sequence[StageSpec]) -> Pipeline:
            return SlowedPipeline(specs, self.profile, self.clock)

        return make

    def links(self, drafters: Sequence[DrafterConfig], links: Sequence[AnyLink]) -> list[AnyLink]:
        """Links to these drafters, in their order.

        Raises `CheckpointError` or `ConfigError` for a head that cannot be read.
        """
        pairs = zip(drafters, links, strict=True)
        return [
            SlowedLink(link, times_of(drafter, self.profile, self._small_model), self.clock)
            for drafter, link in pairs
        ]
