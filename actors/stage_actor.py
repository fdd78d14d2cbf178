"""The actor of a remote pipeline stage."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle

from ..cluster.pipeline.bundle import Bundle, at_node, strategy_of
from ..cluster.transport.stage_worker import StageWorker

StageActor = ray.remote(StageWorker)
# `serve` occupies a thread while the stage runs. The others keep `settle` responsive, and cover an
# old `serve` that has not ended yet.
NUM_THREADS = 3


def spawn_stage(num_cpus: float, num_gpus: float, bundle: Bundle | None = None) -> ActorHandle:
    """Start the actor of one stage, which reserves these resources."""
    stage: Any = StageActor.options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        scheduling_strategy=strategy_of(bundle),
        max_concurrency=NUM_THREADS,
    ).remote()
    return stage


def spawn_beside(node: str | None) -> ActorHandle:
    """Start a stage's actor without resources of its own, on this Ray node; None: Ray chooses.

    For stages with resources reserved elsewhere, and for spare workers.
    """
    stage: Any = StageActor.options(
        num_cpus=0, scheduling_strategy=at_node(node), max_concurrency=NUM_THREADS
    ).remote()
    return stage
