"""The HTTP API: OpenAI's routes, those that operators expect, and `/openapi.json`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from ... import __version__
from ...cluster.config import EngineConfig
from ...cluster.loop_calls import off_loop
from ...core.errors import DraftlineError
from ..observe.otlp import request_tracer
from ..settings.settings import ServerConfig
from ..tenants import TenantWatch, open_tenant_store
from .engine_client import EngineClient
from .errors import ApiError, to_api_error
from .http.callers import OPEN_PATHS, Callers
from .http.gate import Gate, gate_of
from .http.metrics import AnsweringPage, MetricsPage, ServerMetrics
from .http.middleware import (
    BODY_TIMEOUT_S,
    REQUEST_ID_HEADER,
    AllowedOrigins,
    Drain,
    Guard,
    RequestIds,
)
from .routes.generation import BODIES, add_post_routes
from .routes.models import HEADER as IGNORED_FIELDS_HEADER
from .routes.models import Bodies, ServedModel, ServedModels, add_model_routes
from .routes.operations import LIVE_PAGE_FILES, add_operations_routes, no_such_route
from .schema.request_models import RequestModel

if TYPE_CHECKING:
    from ..observe.spans import RequestTracer

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


def create_app(
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

    engine   its settings, which `/v1/models` and `/server_info` report
    metrics  where requests are counted; by default, in this app
    tracer   makes spans of requests; by default, as the settings say

    The other arguments are those of `create_models_app`.
    """
    metrics = metrics or ServerMetrics(model_name)
    model = ServedModel(
        name=model_name,
        engine_client=engine_client,
        config=config,
        metrics=metrics,
        settings=engine,
    )
    return create_models_app(
        [model], config, metrics, drain=drain, behind_proxy=behind_proxy, gate=gate, tracer=tracer
    )


def create_models_app(
    models: Sequence[ServedModel],
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
    behind_proxy  a proxy before the app adds request ids
    gate          where limits of tenants are counted; by default, as the settings say
    """
    drain = drain or Drain()
    gate = gate or gate_of(config, partial(metrics.store_failed, "rate_limit"))
    names = ",".join(model.name for model in models)
    tracer = tracer or request_tracer(config, names, __version__)
    callers = Callers(config)
    watch = _watch(config, callers, metrics)
    engine_clients = [model.engine_client for model in models]

    app = FastAPI(
        title="draftline",
        version=__version__,
        lifespan=lambda _app: _running(engine_clients, gate, watch, tracer),
    )
    served = ServedModels(models)
    add_post_routes(app, models, Bodies(config, served), tracer)
    add_model_routes(app, served)
    add_operations_routes(app, models, config, metrics, drain)
    describe(app, BODIES)
    for kind in (ApiError, DraftlineError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    # The last one added is the outermost.
    open_paths = OPEN_PATHS | LIVE_PAGE_FILES.keys() if config.live_page else OPEN_PATHS
    app.add_middleware(
        Guard,
        callers=callers,
        drain=drain,
        gate=gate,
        is_open=not config.has_keys,
        open_paths=open_paths,
        counted_paths=BODIES.keys(),
        on_refused=metrics.refused,
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=BODY_TIMEOUT_S,
    )
    if config.cors_allow_origins:
        exposed = (REQUEST_ID_HEADER, "retry-after", IGNORED_FIELDS_HEADER, *RATE_HEADERS)
        # Browsers ask without a key.
        app.add_middleware(AllowedOrigins, config=config, exposed=exposed)
    paths = {route.path for route in app.routes if isinstance(route, Route | APIRoute)}
    # A refused request has an id, too.
    app.add_middleware(
        RequestIds, makes_ids=not behind_proxy, paths=paths if config.log_requests else None
    )
    return app


def _watch(config: ServerConfig, callers: Callers, metrics: MetricsPage) -> TenantWatch | None:
    """The watch over the store of tenants, if there is one."""
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
    """Start what the app needs, and stop it at the end."""
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


def _answer_nobody(_request: Request, _error: Exception) -> Response:
    """The response to a client that has disconnected; it is not sent."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


def _answer_error(request: Request, error: Exception) -> Response:
    # Raised by Starlette: no such route, wrong method.
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        answer = no_such_route(request.method, request.url.path)
    elif isinstance(error, HTTPException):
        answer = ApiError(error.status_code, str(error.detail))
    else:
        answer = to_api_error(error)
    return JSONResponse(answer.body_for(request.scope), answer.status, answer.headers)


REFS = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": "integer", "description": "the HTTP status"},
            },
        }
    },
}


def describe(app: FastAPI, bodies: Mapping[str, type[RequestModel]]) -> None:
    """Add bodies, by path, and errors to `/openapi.json`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, bodies)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] - as FastAPI's documentation does


def _schema(app: FastAPI, bodies: Mapping[str, type[RequestModel]]) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = sorted(set(bodies.values()), key=lambda model: model.__name__)
    keys, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=REFS
    )
    components = schema.setdefault("components", {})
    components["schemas"] = {**definitions["$defs"], "Error": ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    # A server without keys asks for none.
    schema["security"] = [{}, {"key": []}]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _describe(operation)
            if method == "post" and path in bodies:
                reference = keys[bodies[path], "validation"]
                operation["requestBody"] = _json(reference, required=True)
                _describe_answer(operation, bodies[path])
    return schema


def _describe(operation: dict[str, Any]) -> None:
    """Every error has one shape."""
    responses = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "an error",
        **_json({"$ref": REFS.format(model="Error")}),
    }


def _describe_answer(operation: dict[str, Any], model: type[RequestModel]) -> None:
    content = operation["responses"]["200"]["content"]
    content["application/json"] = {"schema": {"type": "object"}}
    if "stream" in model.model_fields:
        content["text/event-stream"] = {"schema": {"type": "string"}}


def _json(schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}, **more}
