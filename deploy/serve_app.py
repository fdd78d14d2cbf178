"""The Ray Serve application: an ingress that speaks HTTP and engine replicas behind it.

`serve run deploy/serve.yaml` deploys it; `draftline serve --backend ray` does the same in one
command. One engine replica is a coordinator, its stage actors and its drafter actors, together in
the replica's placement group.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from ..cluster.config import EngineConfig
from ..cluster.loop_calls import spare_collector
from ..cluster.ray_gpus import cluster_has_gpus
from ..core.output import Delta
from ..core.request_options import RequestOptions
from ..core.sampling_params import SamplingParams
from .deployment_plan import engine_options, with_device
from .drain import Drain
from .engine_face import LocalFace
from .engine_stats import EngineStats
from .exposure import require_keys
from .openai_api import create_app
from .ray_face import RayFace
from .ray_runtime import serve_host
from .settings import ServeArgs, ServerConfig, build_serve_args

ENGINE_NAME = "engine"
INGRESS_NAME = "ingress"
# The ingress only passes requests on: the replicas behind it say when they are full.
INGRESS_MAX_ONGOING = 10_000
# Requests that were ended get so long to tell their clients.
ENDING_TIMEOUT_S = 3.0


def build_app(args: Mapping[str, Any] | ServeArgs) -> Application:
    """The application for `serve run` and `serve deploy`; `args` are the keys of a config file.

    Raises `ConfigError` naming the field.
    """
    checked = args if isinstance(args, ServeArgs) else build_serve_args({"backend": "ray", **args})
    require_keys(checked.server, serve_host() or checked.server.host)
    checked = with_device(checked, has_gpus=bool(cluster_has_gpus()))
    options = engine_options(checked)
    engine = EngineReplica.options(**options).bind(checked.engine, checked.server.max_unread_bytes)
    ingress = Ingress.options(
        num_replicas=checked.deployment.num_ingress_replicas,
        ray_actor_options={"num_cpus": checked.deployment.ingress_cpus},
    )
    return ingress.bind(engine, checked.engine, checked.server, checked.model_name)


@serve.deployment(name=ENGINE_NAME, max_constructor_retry_count=2)
class EngineReplica:
    """One engine with its stages and drafters."""

    async def __init__(self, config: EngineConfig, max_unread_bytes: int | None = None) -> None:
        # The ingress and the driver never load the engine's code.
        from .engine import AsyncEngine  # noqa: PLC0415

        replica_id = serve.get_replica_context().replica_id.unique_id
        self._engine = AsyncEngine(config, engine_id=replica_id, max_unread_bytes=max_unread_bytes)
        face = LocalFace(self._engine)
        await face.start()
        self._face = face
        spare_collector()

    async def stream(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
    ) -> AsyncGenerator[Delta, None]:
        """One request's deltas; cancelling the call cancels the request."""
        deltas = self._face.stream(prompt, params, options, request_id=request_id)
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def stats(self) -> EngineStats:
        """Counters and gauges."""
        return self._engine.stats()

    async def is_healthy(self) -> bool:
        """Whether a request sent now would be served."""
        return self._engine.is_healthy()

    async def end_requests(self) -> None:
        """End what runs with an error, for good."""
        await self._face.close()

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if not self._engine.is_healthy():
            raise RuntimeError("the engine does not serve")

    async def __del__(self) -> None:
        """Ray Serve calls and awaits it when the replica stops."""
        if hasattr(self, "_face"):
            await self._face.close()


@serve.deployment(name=INGRESS_NAME, max_ongoing_requests=INGRESS_MAX_ONGOING)
@serve.ingress()
class Ingress:
    """The HTTP API, without state."""

    def __init__(
        self, engine: DeploymentHandle, config: EngineConfig, server: ServerConfig, model_name: str
    ) -> None:
        self._face = RayFace(engine, config)
        self._server = server
        self._model_name = model_name
        self._config = config
        self._drain = Drain()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; those that run get `timeout_s`, and then end with an error."""
        self._drain.begin()
        if not await self._drain.finish(timeout_s):
            await self._face.end_requests()
            await self._drain.finish(ENDING_TIMEOUT_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve serves what this returns."""
        return create_app(
            self._face,
            self._server,
            self._model_name,
            drain=self._drain,
            behind_proxy=True,
            engine=self._config,
        )
