"""What the engine deployment asks of Ray Serve; pure, so that it is tested without Ray."""

from __future__ import annotations

from typing import Any

from ..cluster.config import EngineConfig
from .settings import DeploymentConfig, ServeArgs


def engine_options(args: ServeArgs, *, has_gpus: bool = False) -> dict[str, Any]:
    """Options of the engine deployment, by Ray Serve's names."""
    config = args.deployment
    capacity = args.engine.max_num_seqs + args.engine.max_queued_requests
    options: dict[str, Any] = {
        "max_ongoing_requests": config.max_ongoing_requests or capacity,
        "max_queued_requests": config.max_queued_requests,
        "ray_actor_options": {"num_cpus": config.coordinator_cpus},
        "placement_group_bundles": placement_bundles(args.engine, config, has_gpus=has_gpus),
        "placement_group_strategy": config.placement_group_strategy,
        "health_check_period_s": config.health_check_period_s,
        "health_check_timeout_s": config.health_check_timeout_s,
        "graceful_shutdown_timeout_s": config.graceful_shutdown_timeout_s,
    }
    if config.autoscaling_config is None:
        return options | {"num_replicas": config.num_replicas}
    return options | {"autoscaling_config": config.autoscaling_config}


def placement_bundles(
    engine: EngineConfig, config: DeploymentConfig, *, has_gpus: bool = False
) -> list[dict[str, float]]:
    """One bundle each for the coordinator, every stage and every drafter that has an actor.

    `cluster/bundle.py` relies on this order. `has_gpus` decides where the device is `auto`.
    """
    stage = {"CPU": engine.cpus_per_stage}
    if engine.device == "cuda" or (engine.device == "auto" and has_gpus):
        stage["GPU"] = engine.gpus_per_stage
    actors = [drafter for drafter in engine.drafters if drafter.is_spawned]
    stages = [dict(stage) for _ in range(engine.pipeline_parallel_size)]
    coordinator = {"CPU": config.coordinator_cpus}
    if engine.backend == "local":
        # Everything runs inside the coordinator.
        return [coordinator]
    return [coordinator, *stages, *({"CPU": engine.cpus_per_drafter} for _ in actors)]
