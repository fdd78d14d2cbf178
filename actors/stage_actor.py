"""The actor of a remote pipeline stage."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..cluster.pipeline import StageSpec
from ..cluster.stage_worker import StageWorker

StageActor = ray.remote(StageWorker)


def spawn_stage(
    index: int, spec: StageSpec, placement_group: PlacementGroup | None = None
) -> ActorHandle:
    """Start the actor of one stage, with the resources of its spec."""
    strategy = PlacementGroupSchedulingStrategy(placement_group) if placement_group else "DEFAULT"
    stage: Any = StageActor.options(
        num_cpus=spec.num_cpus,
        num_gpus=spec.num_gpus,
        scheduling_strategy=strategy,
        max_concurrency=2,  # a thread for `watch` and one for everything else
    ).remote(index, spec)
    return stage
