"""The Ray Serve application: an ingress that speaks HTTP and engine replicas behind it.

`serve run deploy/serve.yaml` deploys it; `draftline serve --backend ray` does the same in one
command. With several models (`deploy/models.yaml`) each has a deployment of its own. One engine
replica is a coordinator, its stage actors and its drafter actors, together in the replica's
placement group. Those that compute on CPUs belong to a supervisor (`actors/kept_actors.py`)
and outlive a coordinator that dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
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
from ..settings.settings import ServeArgs, require_keys
from ..settings.several_models import AppArgs, build_app_args
from .autoscaling import FirstTokenTimes
from .deployment_plan import (
    ReplicaHealth,
    engine_options,
    ingress_options,
    priority_warning,
    require_shared_rates,
    text_key,
    with_device,
)
from .prefix_routing import PrefixRouting
from .resume import OtherModel, with_heartbeats
from .runtime import serve_host

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ...actors.kept_actors import DeploymentSupervisor

logger = logging.getLogger(__name__)

INGRESS_NAME = "ingress"
SUPERVISOR_NAME = "supervisor"
# Ray's name for what its head alone has, one of it; Serve's controller asks for as much.
ON_THE_HEAD = {"node:__internal_head__": 0.001}
# A request has lost its replica after so long without an item or heartbeat.
REPLICA_TIMEOUT_S = 5.0
# Heartbeats of a replica, as a share of the silence that ends a stream.
HEARTBEATS = 0.25
# The ingress only passes requests on: the replicas behind it say when they are full.
INGRESS_MAX_ONGOING = 10_000
# Time for the errors of ended requests to reach their clients.
ENDING_TIMEOUT_S = 3.0


def build_app(args: Mapping[str, Any] | ServeArgs) -> Application:
    """The application for `serve run` and `serve deploy`; `args` are the keys of a config file, and
    may be those of several models.

    Raises `ConfigError` naming the field.
    """
    if isinstance(args, ServeArgs):
        app = AppArgs.of(args)
    else:
        app = build_app_args({"backend": "ray", **args})
    if any(model.pools for model in app.models):
        raise ConfigError(
            "pools", "are applications of their own in a file of Ray Serve's: deploy/pool.yaml"
        )
    require_keys(app.server, serve_host() or app.server.host)
    require_shared_rates(app)
    has_gpus = bool(cluster_has_gpus())
    models = tuple(with_device(model, has_gpus=has_gpus) for model in app.models)
    app = replace(app, models=models)
    ingress = Ingress.options(**ingress_options(app))
    return ingress.bind([_engine(app, model) for model in models], app)


def _engine(app: AppArgs, model: ServeArgs) -> Application:
    """The engine replicas of one model."""
    options = engine_options(model) | _supervisor_options(model)
    return EngineReplica.options(name=app.engine_name(model), **options).bind(
        model.engine,
        model.server.usage_log,
        model.server.log_format,
    )


def _supervisor_options(args: ServeArgs) -> dict[str, Any]:
    """The actor that owns stages and drafters and lends them to coordinators."""
    if args.engine.backend != "ray":
        return {}
    # The driver alone needs it; its workers are to import little.
    from ...actors.kept_actors import SupervisorActor  # noqa: PLC0415

    num_first = args.engine.pipeline_parallel_size * args.deployment.num_replicas
    supervisor = DeploymentActorConfig(
        name=SUPERVISOR_NAME,
        actor_class=SupervisorActor,
        init_args=(num_first, args.engine.standby_stages),
        # The loss of its node would end what it owns, also of replicas elsewhere.
        actor_options={"num_cpus": 0, "resources": dict(ON_THE_HEAD)},
    )
    return {"deployment_actors": [supervisor]}


@serve.deployment(max_constructor_retry_count=2)
class EngineReplica:
    """One engine with its stages and drafters."""

    async def __init__(
        self,
        config: EngineConfig,
        usage_log: str | None = None,
        log_format: LogFormat = "text",
    ) -> None:
        set_up_logs(logging.WARNING, log_format)
        # The ingress and the driver never load the engine's code.
        from ..api.engine_client import LocalEngineClient  # noqa: PLC0415
        from ..api.start_notes import engine_notes, log_notes  # noqa: PLC0415
        from ..engine.async_engine import AsyncEngine  # noqa: PLC0415

        log_notes(config.name, engine_notes(config))
        if warning := priority_warning(os.nice(0)):
            logger.warning(warning)
        replica_id = serve.get_replica_context().replica_id.unique_id
        supervisor = _find_supervisor(replica_id) if config.backend == "ray" else None
        self._engine = AsyncEngine(
            config,
            engine_id=replica_id,
            supervisor=supervisor,
            usage_log=usage_log,
        )
        self._text_key = text_key(config)
        self._health = ReplicaHealth(config.recovery_timeout_s, time.monotonic)
        self._first_tokens = FirstTokenTimes(time.monotonic)
        self._heartbeat_s = REPLICA_TIMEOUT_S * HEARTBEATS
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
        """Metrics for `EnginePolicy`; Ray Serve calls it regularly."""
        return self._first_tokens.stats()

    async def is_healthy(self) -> bool:
        """Whether a request sent now would be served."""
        return self._engine.is_healthy()

    async def end_requests(self) -> None:
        """End all requests with an error; they are not resumed."""
        await self._engine_client.close()

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if problem := self._health.problem(self._engine.health()):
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        """Ray Serve calls and awaits it when the replica stops."""
        if hasattr(self, "_engine_client"):
            await self._engine_client.close()


def _find_supervisor(replica_id: str) -> DeploymentSupervisor:
    from ...actors.kept_actors import DeploymentSupervisor  # noqa: PLC0415
    from ...cluster.pipeline.supervisor import Holder  # noqa: PLC0415

    holder = Holder(replica_id, ray.get_runtime_context().current_actor)
    return DeploymentSupervisor(lambda: serve.get_deployment_actor(SUPERVISOR_NAME), holder)


@serve.deployment(name=INGRESS_NAME, max_ongoing_requests=INGRESS_MAX_ONGOING)
@serve.ingress()
class Ingress:
    """The HTTP API, without state."""

    def __init__(self, engines: Sequence[DeploymentHandle], app: AppArgs) -> None:
        """`engines` are those of the models, in their order."""
        set_up_logs(logging.WARNING, app.server.log_format)
        # Engine replicas need none of these.
        from ..api.http.metrics import JointMetrics, ServerMetrics  # noqa: PLC0415
        from ..api.http.middleware import Drain  # noqa: PLC0415
        from .engine_client import RayEngineClient  # noqa: PLC0415

        self._app = app
        own_id = serve.get_replica_context().replica_id.unique_id
        counts = [ServerMetrics(model.model_name, own_id) for model in app.models]
        self._engine_clients: list[RayEngineClient] = []
        for engine, model, metrics in zip(engines, app.models, counts, strict=True):
            PrefixRouting.counts[model.model_name] = metrics
            client = RayEngineClient(engine, model.engine, REPLICA_TIMEOUT_S, metrics)
            self._engine_clients.append(client)
        self._counts = counts
        self._page = counts[0] if len(counts) == 1 else JointMetrics(counts, own_id)
        self._drain = Drain()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; those that run get `timeout_s`, and then end with an error."""
        self._drain.begin()
        if not await self._drain.finish(timeout_s):
            await asyncio.gather(*(client.end_requests() for client in self._engine_clients))
            await self._drain.finish(ENDING_TIMEOUT_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve serves what this returns."""
        # The replicas of the engine do without it, which takes seconds to import.
        from ..api.app import create_models_app  # noqa: PLC0415
        from ..api.routes.models import ServedModel  # noqa: PLC0415
        from ..api.start_notes import log_notes, server_notes  # noqa: PLC0415

        for model in self._app.models:
            log_notes(model.model_name, server_notes(model))
        models = [
            ServedModel(
                name=model.model_name,
                engine_client=client,
                config=model.server,
                metrics=metrics,
                settings=model.engine,
            )
            for model, client, metrics in zip(
                self._app.models, self._engine_clients, self._counts, strict=True
            )
        ]
        return create_models_app(
            models, self._app.server, self._page, drain=self._drain, behind_proxy=True
        )
