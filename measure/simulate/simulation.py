"""The parts of a simulated engine over a cost profile, and its clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...cluster.config import DrafterConfig, EngineConfig
from ...cluster.drafting.hub import AnyDrafter
from ...cluster.drafting.local_drafter import LocalDrafter
from ...cluster.engine.assembly import MakePipeline
from ...cluster.engine.engine_thread import EngineTime
from ...cluster.transport.stage_spec import Pipeline, StageSpec
from ...core.errors import ConfigError
from .cost_profile import SMALL_MODEL, CostProfile
from .draft_times import times_of
from .host_clock import HostClock, HostLoop
from .slowed_drafter import slowed
from .slowed_pipeline import SlowedPipeline


class Simulation:
    """Makes the pipeline and the drafters of one engine, with the times of a profile.

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

    def drafters(
        self, configs: Sequence[DrafterConfig], drafters: Sequence[AnyDrafter]
    ) -> list[AnyDrafter]:
        """The drafters of these settings, which take the profile's times.

        Raises `CheckpointError` or `ConfigError` for a head that cannot be read.
        """
        found: list[AnyDrafter] = []
        for config, local in zip(configs, drafters, strict=True):
            assert isinstance(local, LocalDrafter), "a simulation has its drafters in process"
            times = times_of(config, self.profile, self._small_model)
            found.append(replace(local, drafter=slowed(local.drafter, times, self.clock)))
        return found
