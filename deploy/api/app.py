"""The HTTP API: OpenAI's routes, and those that operators of model servers expect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from ... import __version__
from ...cluster.config import EngineConfig
from ...cluster.loop_calls import off_loop
from ...core.errors import DraftlineError
from ..observe.otlp import request_tracer
from ..observe.request_log import RequestLog
from ..settings.settings import ServerConfig
from ..tenants.store import open_tenant_store
from ..tenants.watch import TenantWatch
from .engine_client import EngineClient
from .errors import ApiError, to_api_error
from .http.callers import OPEN_PATHS, ApiKeys, Callers, caller_of, require_operator
from .http.metrics import CONTENT_TYPE, AnsweringPage, MetricsPage, ServerMetrics
from .http.middleware import REQUEST_ID_HEADER, BodyLimits, Drain, RefuseWhileDraining, RequestIds
from .http.origins import AllowedOrigins
from .rates.admission import RateLimits
from .rates.gate import Gate, gate_of
from .routes.bodies import HEADER as IGNORED_FIELDS_HEADER
from .routes.bodies import Bodies
from .routes.live_page import FILES, add_live_page
from .routes.live_page import PATH as LIVE_PAGE
from .routes.models import ModelSource, ServedModels
from .routes.not_served import no_such_route
from .routes.openapi import describe
from .routes.operations import server_info, server_load, shown
from .routes.text_routes import BODIES, add_text_routes

if TYPE_CHECKING:
    from ..observe.spans import RequestTracer

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


def create_app(  # noqa: PLR0913 - most are keywords
    engine_client: EngineClient,
    config: ServerConfig,
    model_name: str,
    *,
    drain: Drain | None = None,
    behind_proxy: bool = False,
    engine: EngineConfig | None = None,
    metrics: AnsweringPage | None = None,
    gate: Gate | None = None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """The API of one model. The app's start starts `engine_client`, its end closes it.

    engine   its settings, of which `/v1/models` and `/server_info` tell
    metrics  where requests are counted; by default, in this app
    tracer   makes spans of requests; by default, as the settings say

    The rest is as of `create_models_app`.
    """
    metrics = metrics or ServerMetrics(model_name)
    source = ModelSource(
        name=model_name,
        engine_client=engine_client,
        config=config,
        metrics=metrics,
        settings=engine,
    )
    return create_models_app(
        [source], config, metrics, drain=drain, behind_proxy=behind_proxy, gate=gate, tracer=tracer
    )


def create_models_app(  # noqa: PLR0913 - most are keywords
    sources: Sequence[ModelSource],
    config: ServerConfig,
    metrics: MetricsPage,
    *,
    drain: Drain | None = None,
    behind_proxy: bool = False,
    gate: Gate | None = None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """The API of one or several models. The app's start starts their engine clients, its end closes
    them.

    metrics       the page of all models
    drain         counts requests, and refuses new ones once it has begun
    behind_proxy  what stands before the app answers with request ids already
    gate          where limits of tenants are counted; by default, as the settings say
    """
    drain = drain or Drain()
    gate = gate or gate_of(config, partial(metrics.store_failed, "rate_limit"))
    names = ",".join(source.name for source in sources)
    tracer = tracer or request_tracer(config, names, __version__)
    callers = Callers(config)
    watch = _watch(config, callers, metrics)
    engine_clients = [source.engine_client for source in sources]

    app = FastAPI(
        title="draftline",
        version=__version__,
        lifespan=lambda _app: _running(engine_clients, gate, watch, tracer),
    )
    models = ServedModels(sources)
    add_text_routes(app, models.all, Bodies(config, models), tracer)
    _add_model_routes(app, models)
    _add_operator_routes(app, engine_clients, metrics, drain)
    _add_info_routes(app, sources, config)
    if config.live_page:
        add_live_page(app)
    describe(app, BODIES)
    for kind in (ApiError, DraftlineError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_middleware(BodyLimits, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    app.add_middleware(RateLimits, gate=gate, paths=BODIES.keys(), on_refused=metrics.refused)
    _add_middleware(app, config, drain, callers)
    # A refused request has an id, too.
    if not behind_proxy:
        app.add_middleware(RequestIds)
    return app


def _add_middleware(app: FastAPI, config: ServerConfig, drain: Drain, callers: Callers) -> None:
    """What stands before bodies are read; the last one added is the outermost."""
    app.add_middleware(RefuseWhileDraining, drain=drain)
    app.add_middleware(
        ApiKeys,
        callers=callers,
        is_open=not config.has_keys,
        open_paths=OPEN_PATHS | FILES.keys() if config.live_page else OPEN_PATHS,
    )
    if config.cors_allow_origins:
        exposed = (REQUEST_ID_HEADER, "retry-after", IGNORED_FIELDS_HEADER, *RATE_HEADERS)
        # Browsers ask without a key.
        app.add_middleware(AllowedOrigins, config=config, exposed=exposed)
    if config.log_requests:
        paths = {route.path for route in app.routes if isinstance(route, Route | APIRoute)}
        app.add_middleware(RequestLog, paths=paths)


def _watch(config: ServerConfig, callers: Callers, metrics: MetricsPage) -> TenantWatch | None:
    """What follows the store of tenants, where there is one."""
    if config.tenant_store is None:
        return None
    failed = partial(metrics.store_failed, "tenants")
    return TenantWatch(open_tenant_store(config.tenant_store), callers.use, failed)


@asynccontextmanager
async def _running(
    engine_clients: Sequence[EngineClient],
    gate: Gate,
    watch: TenantWatch | None,
    tracer: RequestTracer | None,
) -> AsyncIterator[None]:
    """From the app's start to its end."""
    async with AsyncExitStack() as stack:
        for engine_client in engine_clients:
            await engine_client.start()
            stack.push_async_callback(engine_client.close)
        if tracer is not None:
            stack.push_async_callback(off_loop, tracer.close)
        await gate.start()
        stack.push_async_callback(gate.close)
        if watch is not None:
            await watch.start()
            stack.push_async_callback(watch.close)
        yield


def _add_model_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The models of this server that the caller may use."""
        caller = caller_of(request)
        return {"object": "list", "data": [model.card(caller) for model in models.usable(caller)]}

    @app.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str, request: Request) -> dict[str, Any]:
        """One model."""
        caller = caller_of(request)
        return models.find(model_id, caller).card(caller)


def _add_operator_routes(
    app: FastAPI, engine_clients: Sequence[EngineClient], metrics: MetricsPage, drain: Drain
) -> None:
    @app.post("/ping", include_in_schema=False)
    @app.head("/ping", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.head("/readyz", include_in_schema=False)
    @app.get("/health")
    @app.get("/readyz")
    @app.get("/ping")
    async def health() -> Response:
        """200 while requests are served, of one model at least, else 503."""
        if drain.is_draining:
            raise drain.refusal()
        if any(await asyncio.gather(*(client.is_healthy() for client in engine_clients))):
            return JSONResponse({"status": "ok"})
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine is not ready")

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez")
    async def alive() -> dict[str, str]:
        """200 while the server runs: what cannot serve now may come back by itself."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """Prometheus text, for the operator."""
        require_operator(request)
        return Response(await metrics.text(engine_clients), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """draftline's version."""
        return {"version": __version__}


def _add_info_routes(app: FastAPI, sources: Sequence[ModelSource], config: ServerConfig) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/")
    async def root() -> dict[str, str]:
        """What this server has, for whoever opens its address; no key is needed."""
        page = {"ui": LIVE_PAGE} if config.live_page else {}
        return {"server": "draftline", "api": "/v1", **page}

    @app.get("/server_info")
    async def info(request: Request) -> dict[str, Any]:
        """Versions and settings, without secrets, for the operator."""
        require_operator(request)
        stats = await asyncio.gather(*(source.engine_client.stats() for source in sources))
        names = [source.name for source in sources]
        told = server_info({"server": config}, dict(zip(names, stats, strict=True)))
        settings = {source.name: shown(source.settings) for source in sources}
        if len(sources) == 1:
            return told | {"engine": settings[names[0]]}
        return told | {"models": settings}

    @app.get("/load")
    async def load(request: Request) -> dict[str, int]:
        """Requests that run or wait, for the operator."""
        require_operator(request)
        stats = await asyncio.gather(*(source.engine_client.stats() for source in sources))
        return server_load([engine for engines in stats for engine in engines])


def _answer_nobody(_request: Request, _error: Exception) -> Response:
    """The client has left: nobody reads this, and nothing is wrong."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


def _answer_error(request: Request, error: Exception) -> Response:
    # Raised by Starlette: no such route, wrong method.
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        answer = no_such_route(request.method, request.url.path)
    elif isinstance(error, HTTPException):
        answer = ApiError(error.status_code, str(error.detail))
    else:
        answer = to_api_error(error)
    return JSONResponse(answer.body, answer.status, answer.headers)
