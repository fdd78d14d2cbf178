"""The Ray Serve application: an ingress that speaks HTTP and engine replicas behind it.

`serve run deploy/serve.yaml` deploys it; `draftline serve --backend ray` does the same in one
command. One engine replica is a coordinator, its stage actors and its drafter actors, together in
the replica's placement group. Those that compute on CPUs belong to a keeper
(`actors/keeper_actor.py`) and outlive a coordinator that dies.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig
from ray.serve.handle import DeploymentHandle

from ...cluster.config import EngineConfig
from ...cluster.loop_calls import spare_collector
from ...cluster.pipeline.bundle import cluster_has_gpus
from ...core.errors import ConfigError
from ...core.request.output import Delta
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ..engine.stats import EngineStats
from ..observe.log_format import LogFormat, set_up_logs
from ..settings.exposure import require_keys
from ..settings.settings import DeploymentConfig, ServeArgs, ServerConfig, build_serve_args
from .deployment_plan import (
    ReplicaHealth,
    engine_options,
    has_keeper,
    ingress_options,
    priority_warning,
    require_shared_rates,
    resume_limits,
    text_key,
    with_device,
)
from .engine_policy import FirstTokens
from .heartbeat import with_heartbeats
from .prefix_routing import PrefixRouting
from .resume import OtherModel
from .runtime import serve_host

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ...actors.kept_actors import DeploymentKeeper

logger = logging.getLogger(__name__)

ENGINE_NAME = "engine"
INGRESS_NAME = "ingress"
KEEPER_NAME = "keeper"
# Ray's name for what its head alone has, one of it; Serve's controller asks for as much.
ON_THE_HEAD = {"node:__internal_head__": 0.001}
# A replica's signs of life, as a share of the silence that ends a stream.
HEARTBEATS = 0.25
# The ingress only passes requests on: the replicas behind it say when they are full.
INGRESS_MAX_ONGOING = 10_000
# Requests that were ended get so long to tell their clients.
ENDING_TIMEOUT_S = 3.0


def build_app(args: Mapping[str, Any] | ServeArgs) -> Application:
    """The application for `serve run` and `serve deploy`; `args` are the keys of a config file.

    Raises `ConfigError` naming the field.
    """
    checked = args if isinstance(args, ServeArgs) else build_serve_args({"backend": "ray", **args})
    if checked.pools:
        raise ConfigError(
            "pools", "are applications of their own in a file of Ray Serve's: deploy/pool.yaml"
        )
    require_keys(checked.server, serve_host() or checked.server.host)
    require_shared_rates(checked)
    checked = with_device(checked, has_gpus=bool(cluster_has_gpus()))
    options = engine_options(checked) | _keeper_options(checked)
    engine = EngineReplica.options(**options).bind(
        checked.engine,
        checked.deployment,
        checked.server.max_unread_bytes,
        checked.server.usage_log,
        checked.server.log_format,
    )
    ingress = Ingress.options(**ingress_options(checked))
    return ingress.bind(
        engine, checked.engine, checked.server, checked.deployment, checked.model_name
    )


def _keeper_options(args: ServeArgs) -> dict[str, Any]:
    """The actor that keeps stages and drafters from one coordinator to the next."""
    if not has_keeper(args.engine, args.deployment):
        return {}
    # The driver alone needs it; its workers are to import little.
    from ...actors.keeper_actor import KeeperActor  # noqa: PLC0415

    num_first = args.engine.pipeline_parallel_size * args.deployment.num_replicas
    keeper = DeploymentActorConfig(
        name=KEEPER_NAME,
        actor_class=KeeperActor,
        init_args=(num_first, args.engine.standby_stages),
        # With its node all that it keeps would end, of replicas elsewhere, too.
        actor_options={"num_cpus": 0, "resources": dict(ON_THE_HEAD)},
    )
    return {"deployment_actors": [keeper]}


@serve.deployment(name=ENGINE_NAME, max_constructor_retry_count=2)
class EngineReplica:
    """One engine with its stages and drafters."""

    async def __init__(
        self,
        config: EngineConfig,
        deployment: DeploymentConfig,
        max_unread_bytes: int | None = None,
        usage_log: str | None = None,
        log_format: LogFormat = "text",
    ) -> None:
        set_up_logs(logging.WARNING, log_format)
        # The ingress and the driver never load the engine's code.
        from ..api.engine_client import LocalEngineClient  # noqa: PLC0415
        from ..engine.engine import AsyncEngine  # noqa: PLC0415

        if warning := priority_warning(os.nice(0)):
            logger.warning(warning)
        replica_id = serve.get_replica_context().replica_id.unique_id
        keeper = _find_keeper(replica_id) if has_keeper(config, deployment) else None
        self._engine = AsyncEngine(
            config,
            engine_id=replica_id,
            keeper=keeper,
            max_unread_bytes=max_unread_bytes,
            usage_log=usage_log,
        )
        self._text_key = text_key(config)
        self._health = ReplicaHealth(config.recovery_timeout_s, time.monotonic)
        self._first_tokens = FirstTokens(time.monotonic)
        self._heartbeat_s = deployment.replica_timeout_s * HEARTBEATS
        engine_client = LocalEngineClient(self._engine)
        await engine_client.start()
        self._engine_client = engine_client
        spare_collector()

    async def stream(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
        key: str,
    ) -> AsyncGenerator[list[Delta] | None, None]:
        """One request's deltas, and None now and then; cancelling the call cancels the request.

        `key`: the sender's `text_key`. Raises `OtherModel` for an answer that another has begun.
        An item of Ray Serve's costs more than a step of a small model: all deltas that wait go as
        one. They have texts only where stop texts cut them.
        """
        if options.answered and key != self._text_key:
            raise OtherModel("the server changes to another model")
        batches = self._engine.stream_batches(
            prompt, params, options, request_id=request_id, with_text=False
        )
        alive = with_heartbeats(batches, self._heartbeat_s)
        with self._first_tokens.waiting() as came:
            async with aclosing(alive):
                async for deltas in alive:
                    if deltas is not None:
                        came()
                    yield deltas

    async def stats(self) -> EngineStats:
        """Counters and gauges."""
        return self._engine.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve asks for now and then, for `EnginePolicy`."""
        return self._first_tokens.stats()

    async def is_healthy(self) -> bool:
        """Whether a request sent now would be served."""
        return self._engine.is_healthy()

    async def end_requests(self) -> None:
        """End what runs with an error, for good."""
        await self._engine_client.close()

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if problem := self._health.problem(self._engine.health()):
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        """Ray Serve calls and awaits it when the replica stops."""
        if hasattr(self, "_engine_client"):
            await self._engine_client.close()


def _find_keeper(replica_id: str) -> DeploymentKeeper:
    from ...actors.kept_actors import DeploymentKeeper  # noqa: PLC0415
    from ...cluster.pipeline.keeper import Holder  # noqa: PLC0415

    holder = Holder(replica_id, ray.get_runtime_context().current_actor)
    return DeploymentKeeper(lambda: serve.get_deployment_actor(KEEPER_NAME), holder)


@serve.deployment(name=INGRESS_NAME, max_ongoing_requests=INGRESS_MAX_ONGOING)
@serve.ingress()
class Ingress:
    """The HTTP API, without state."""

    def __init__(
        self,
        engine: DeploymentHandle,
        config: EngineConfig,
        server: ServerConfig,
        deployment: DeploymentConfig,
        model_name: str,
    ) -> None:
        set_up_logs(logging.WARNING, server.log_format)
        # The replicas of the engine need none of these.
        from ..api.http.metrics import ServerMetrics  # noqa: PLC0415
        from ..api.http.middleware import Drain  # noqa: PLC0415
        from .engine_client import RayEngineClient  # noqa: PLC0415

        self._metrics = PrefixRouting.counts = ServerMetrics(model_name)
        silence_s, limits = deployment.replica_timeout_s, resume_limits(deployment)
        self._engine_client = RayEngineClient(engine, config, silence_s, limits, self._metrics)
        self._server = server
        self._model_name = model_name
        self._config = config
        self._drain = Drain()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; those that run get `timeout_s`, and then end with an error."""
        self._drain.begin()
        if not await self._drain.finish(timeout_s):
            await self._engine_client.end_requests()
            await self._drain.finish(ENDING_TIMEOUT_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve serves what this returns."""
        # The replicas of the engine do without it, which takes seconds to import.
        from ..api.app import create_app  # noqa: PLC0415

        return create_app(
            self._engine_client,
            self._server,
            self._model_name,
            drain=self._drain,
            behind_proxy=True,
            engine=self._config,
            metrics=self._metrics,
        )
