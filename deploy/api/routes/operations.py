"""Routes for operators: health, load, metrics, settings, and the page at `/ui`."""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, SecretStr

from .... import __version__
from ...engine.stats import EngineStats
from ...settings.settings import ServerConfig
from ..engine_client import EngineClient
from ..errors import ApiError
from ..http.callers import require_operator
from ..http.metrics import CONTENT_TYPE, MetricsPage
from ..http.middleware import Drain
from .models import ServedModel

LIBRARIES = ("torch", "transformers", "ray", "fastapi", "uvicorn", "llguidance", "openai")
HIDDEN = "***"
# Names of settings whose texts are secrets, or lead to them.
SECRET = re.compile(r"(^|_)(keys?|sha256|secret|password|passwd|token|credentials?)(_|$)", re.I)


def add_operations_routes(
    app: FastAPI,
    models: Sequence[ServedModel],
    config: ServerConfig,
    metrics: MetricsPage,
    drain: Drain,
) -> None:
    """Add all of them; the page at `/ui` where the settings want it."""
    _add_health_routes(app, [model.engine_client for model in models], metrics, drain)
    _add_info_routes(app, models, config)
    if config.live_page:
        _add_live_page(app)


def _add_health_routes(
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
        """200 while the process runs, also while the engine recovers."""
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


def _add_info_routes(app: FastAPI, models: Sequence[ServedModel], config: ServerConfig) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/")
    async def root() -> dict[str, str]:
        """The paths of this server; needs no key."""
        page = {"ui": LIVE_PAGE} if config.live_page else {}
        return {"server": "draftline", "api": "/v1", **page}

    @app.get("/server_info")
    async def info(request: Request) -> dict[str, Any]:
        """Versions and settings, without secrets, for the operator."""
        require_operator(request)
        stats = await asyncio.gather(*(model.engine_client.stats() for model in models))
        names = [model.name for model in models]
        info = server_info({"server": config}, dict(zip(names, stats, strict=True)))
        settings = {model.name: shown(model.settings) for model in models}
        if len(models) == 1:
            return info | {"engine": settings[names[0]]}
        return info | {"models": settings}

    @app.get("/load")
    async def load(request: Request) -> dict[str, int]:
        """Requests that run or wait, for the operator."""
        require_operator(request)
        stats = await asyncio.gather(*(model.engine_client.stats() for model in models))
        return server_load([engine for engines in stats for engine in engines])


def server_info(
    settings: Mapping[str, BaseModel | None], stats: Mapping[str, Sequence[EngineStats]]
) -> dict[str, Any]:
    """Versions, settings by section without their secrets, and what each engine does now.

    `stats` by model.
    """
    return {
        "version": __version__,
        "versions": versions(),
        **{name: shown(section) for name, section in settings.items()},
        "engines": [
            {
                "model": model,
                "engine_id": engine.engine_id,
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
                "kv_usage": engine.kv_usage,
                "num_steps": engine.num_steps,
                "drafters": [
                    {
                        "name": drafter.name,
                        "connected": drafter.connected,
                        "left_out": drafter.left_out,
                    }
                    for drafter in engine.drafters
                ],
            }
            for model, engines in stats.items()
            for engine in engines
        ],
    }


def shown(settings: BaseModel | None) -> dict[str, Any] | None:
    """Settings without their secrets."""
    return None if settings is None else without_secrets(settings.model_dump())


def server_load(stats: Sequence[EngineStats]) -> dict[str, int]:
    """Requests that run or wait; `server_load` is vLLM's name for all of them."""
    running = sum(engine.num_running for engine in stats)
    waiting = sum(engine.num_waiting for engine in stats)
    return {"server_load": running + waiting, "num_running": running, "num_waiting": waiting}


def versions() -> dict[str, str]:
    """Versions of Python and of those of `LIBRARIES` that are installed."""
    by_name = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_name


def without_secrets(value: Any, name: str = "") -> Any:
    """The value as JSON, with secrets hidden: by their names, and in addresses."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, SecretStr) or SECRET.search(name):
        return HIDDEN
    return _without_password(str(value))


def _without_password(text: str) -> str:
    """The text, without users and passwords in addresses."""
    if "://" not in text or "@" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return HIDDEN
    if "@" not in parts.netloc:
        return text
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{HIDDEN}@{host}"))


LIVE_PAGE_FOLDER = Path(__file__).parents[2] / "assets" / "ui"
LIVE_PAGE = "/ui"
LIVE_PAGE_INDEX = "index.html"
LIVE_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only the page's own files may run, and no other page may frame it: it handles the key.
LIVE_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LIVE_PAGE_HEADERS = {
    "content-security-policy": LIVE_PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# By path; only these are served, whatever else lies in the folder.
LIVE_PAGE_FILES = {
    LIVE_PAGE if file.name == LIVE_PAGE_INDEX else f"{LIVE_PAGE}/{file.name}": file
    for file in sorted(LIVE_PAGE_FOLDER.iterdir())
    if file.suffix in LIVE_PAGE_TYPES
}


def _add_live_page(app: FastAPI) -> None:
    """Serve the page and its files, which are read now."""
    for path, file in LIVE_PAGE_FILES.items():
        answer = partial(_answer, file.read_bytes(), LIVE_PAGE_TYPES[file.suffix])
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)


async def _answer(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=LIVE_PAGE_HEADERS)


SERVED = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /tokenize, "
    "/detokenize"
)
# First parts of paths, below /v1 or not.
NOT_SERVED = {
    "embeddings": "embeddings",
    "embed": "embeddings",
    "pooling": "pooling",
    "classify": "classification",
    "score": "scores",
    "rerank": "reranking",
    "audio": "audio",
    "images": "images",
    "videos": "videos",
    "moderations": "moderation",
    "files": "files",
    "uploads": "files",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "conversations": "conversations",
    "vector_stores": "vector stores",
    "realtime": "realtime sessions",
    "generate": "SGLang's own API",
}


def no_such_route(method: str, path: str) -> ApiError:
    """404 for a path that no route has, which says what this server does."""
    parts = [part for part in path.split("/") if part not in ("", "v1", "v2")]
    what = NOT_SERVED.get(parts[0]) if parts else None
    if what is None:
        message = f"there is no {method} {path[:200]!r}; this server has {SERVED}"
    else:
        message = f"{what}: not served here; this server generates text, with {SERVED}"
    return ApiError(HTTPStatus.NOT_FOUND, message)
