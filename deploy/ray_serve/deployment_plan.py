"""What the engine deployment asks of Ray Serve, and when a replica is replaced; without Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...cluster.config import EngineConfig
from ...core.errors import ConfigError
from ..settings.settings import DeploymentConfig, ServeArgs


def with_device(args: ServeArgs, *, has_gpus: bool) -> ServeArgs:
    """The settings with the device decided: what is reserved is what stages will ask for."""
    if args.engine.device != "auto":
        return args
    device = "cuda" if has_gpus else "cpu"
    return replace(args, engine=args.engine.model_copy(update={"device": device}))


def engine_options(args: ServeArgs) -> dict[str, Any]:
    """Options of the engine deployment, by Ray Serve's names."""
    config = args.deployment
    coordinator, *others = placement_bundles(args.engine, config)
    actor = {"num_cpus": coordinator["CPU"]}
    if "GPU" in coordinator:
        actor["num_gpus"] = coordinator["GPU"]
    capacity = args.engine.max_num_seqs + args.engine.max_queued_requests
    options: dict[str, Any] = {
        "max_ongoing_requests": config.max_ongoing_requests or capacity,
        "max_queued_requests": config.max_queued_requests,
        "ray_actor_options": actor,
        "placement_group_bundles": [coordinator, *others],
        "placement_group_strategy": config.placement_group_strategy,
        "health_check_period_s": config.health_check_period_s,
        "health_check_timeout_s": config.health_check_timeout_s,
        "graceful_shutdown_timeout_s": config.graceful_shutdown_timeout_s,
    }
    if config.autoscaling_config is None:
        return options | {"num_replicas": config.num_replicas}
    return options | {"autoscaling_config": config.autoscaling_config}


def placement_bundles(engine: EngineConfig, config: DeploymentConfig) -> list[dict[str, float]]:
    """One bundle each for the coordinator, every stage and every drafter that has an actor.

    `cluster/pipeline/bundle.py` relies on this order.
    """
    gpus = engine.gpus_per_stage if engine.device == "cuda" else 0.0
    if engine.backend == "local":
        # Everything runs inside the coordinator.
        return [_bundle(config.coordinator_cpus, gpus)]
    num_actors = sum(drafter.servers for drafter in engine.drafters if drafter.is_spawned)
    return [
        _bundle(config.coordinator_cpus, 0.0),
        *(_bundle(engine.cpus_per_stage, gpus) for _ in range(engine.pipeline_parallel_size)),
        *(_bundle(engine.cpus_per_drafter, engine.gpus_per_drafter) for _ in range(num_actors)),
    ]


def require_shared_rates(args: ServeArgs) -> None:
    """Raise `ConfigError` where several HTTP replicas would each count a tenant's limits alone."""
    if args.deployment.num_ingress_replicas == 1 or args.server.rate_limit_store is not None:
        return
    for index, tenant in enumerate(args.server.tenants):
        limits = tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_concurrency
        if any(limits):
            raise ConfigError(
                f"server.tenants[{index}]",
                "has limits, which several HTTP replicas (num_ingress_replicas) must count in one "
                "place; set server.rate_limit_store to a redis:// URL",
            )


def has_keeper(engine: EngineConfig, config: DeploymentConfig) -> bool:
    """Whether stages and drafters belong to an actor that outlives their coordinator."""
    return engine.backend == "ray" and config.keep_actors


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


class ReplicaHealth:
    """Gives an engine that replaces lost stages the time to do so.

    recovery_timeout_s  how long it may take
    clock               seconds; only differences count
    """

    def __init__(self, recovery_timeout_s: float, clock: Callable[[], float]) -> None:
        self._recovery_timeout_s = recovery_timeout_s
        self._clock = clock
        self._since: float | None = None

    def problem(self, state: str) -> str | None:
        """Why the replica should be replaced; None: it should stay.

        state  of the engine: starting, ready, recovering, failed or closed
        """
        if state == "ready":
            self._since = None
            return None
        if state in ("failed", "closed"):
            return f"the engine has {state}"
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since <= self._recovery_timeout_s:
            return None
        return f"the engine is {state} for more than {self._recovery_timeout_s:g} s"
