"""The actor of a remote pipeline stage."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle

from ..cluster.bundle import Bundle, strategy_of
from ..cluster.pipeline import StageSpec
from ..cluster.stage_worker import StageWorker

StageActor = ray.remote(StageWorker)


def spawn_stage(index: int, spec: StageSpec, bundle: Bundle | None = None) -> ActorHandle:
    """Start the actor of one stage, with the resources of its spec."""
    stage: Any = StageActor.options(
        num_cpus=spec.num_cpus,
        num_gpus=spec.num_gpus,
        scheduling_strategy=strategy_of(bundle),
        max_concurrency=2,  # a thread for `watch` and one for everything else
    ).remote(index, spec)
    return stage
