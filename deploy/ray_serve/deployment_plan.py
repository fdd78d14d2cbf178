"""Options of the deployments, and when a replica is replaced; does not import Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...cluster.config import EngineConfig
from ...core.errors import ConfigError
from ..settings.settings import DeploymentConfig, ServeArgs
from ..settings.several_models import AppArgs
from .autoscaling import EnginePolicy

POLICY = f"{EnginePolicy.__module__}:{EnginePolicy.__qualname__}"
ROUTER = f"{__package__}.request_router.PrefixRouter"
# What an ingress has beyond its requests' time, to notice lost replicas and answer clients.
INGRESS_SLACK_S = 8.0
# Assumed longest time of requests without a limit.
LONGEST_REQUEST_S = 3600.0
# Assumed KV tokens of a replica whose cache is as large as its GPU has room for.
DEFAULT_CACHED_TOKENS = 500_000
# A running request at a replica costs as much as so many prompt tokens.
ROUTER_LOAD_TOKENS = 64
# Ray Serve replaces a replica that does not answer three health checks.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 1.0, 5.0


def with_device(args: ServeArgs, *, has_gpus: bool) -> ServeArgs:
    """The settings with a definite device, so that reservations are those of the stages."""
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
        "max_ongoing_requests": capacity,
        "max_queued_requests": config.max_queued_requests,
        "ray_actor_options": actor,
        "placement_group_bundles": [coordinator, *others],
        "placement_group_strategy": config.placement_group_strategy,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": drain_s(args),
        "max_surge_percent": config.max_surge_percent,
        "request_router_config": router_config(args),
    }
    if config.autoscaling_config is None:
        return options | {"num_replicas": config.num_replicas}
    return options | {"autoscaling_config": autoscaling(config, config.autoscaling_config)}


def autoscaling(config: DeploymentConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Ray Serve's autoscaling fields, with a policy for times to the first token, if wanted."""
    if config.target_ttft_s is None:
        return dict(given)
    targets = {"target_ttft_s": config.target_ttft_s}
    if "target_ongoing_requests" in given:
        targets["target_ongoing_requests"] = given["target_ongoing_requests"]
    return {**given, "policy": {"policy_function": POLICY, "policy_kwargs": targets}}


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


def router_config(args: ServeArgs) -> dict[str, Any]:
    """The engine deployment's request router, by Ray Serve's names."""
    engine = args.engine
    num_tokens = engine.kv_cache_tokens or DEFAULT_CACHED_TOKENS
    return {
        "request_router_class": ROUTER,
        "request_router_kwargs": {
            "model_name": args.model_name,
            "block_size": engine.block_size,
            "max_blocks": num_tokens // engine.block_size if engine.enable_prefix_caching else 0,
            "load_tokens": ROUTER_LOAD_TOKENS,
        },
    }


def ingress_options(app: AppArgs) -> dict[str, Any]:
    """Options of the ingress.

    Its streams cannot move to another ingress, so it stops after its requests have ended. If all
    engines stop, that is soon after them.
    """
    config, longest_s = app.deployment, app.server.request_timeout_s
    drains_s = (drain_s(model) for model in app.models)
    wait_s = max(*drains_s, LONGEST_REQUEST_S if longest_s is None else longest_s)
    return {
        "num_replicas": config.num_ingress_replicas,
        "ray_actor_options": {"num_cpus": config.ingress_cpus},
        "graceful_shutdown_timeout_s": wait_s + INGRESS_SLACK_S,
        "max_surge_percent": config.max_surge_percent,
    }


def drain_s(args: ServeArgs) -> float:
    """Time for the running requests of an engine replica that stops."""
    given = args.deployment.graceful_shutdown_timeout_s
    return args.server.drain_timeout_s if given is None else given


def text_key(engine: EngineConfig) -> str:
    """Equal for engines that generate the same tokens."""
    parts = (
        engine.model, engine.dtype, engine.quantization, engine.kv_cache_dtype, engine.acceptance,
    )  # fmt: skip
    return repr(parts)


def require_shared_rates(args: AppArgs) -> None:
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


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def priority_warning(niceness: int) -> str | None:
    """A warning if the replica has a lower priority than other processes; None: it has not."""
    if niceness <= 0:
        return None
    return (
        f"event=low_priority niceness={niceness} what else runs here goes first; start Ray with "
        "RAY_worker_niceness=0 in its environment"
    )


class ReplicaHealth:
    """Keeps a replica whose engine replaces lost stages.

    recovery_timeout_s  longest time of that
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
