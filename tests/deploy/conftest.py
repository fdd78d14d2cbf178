"""The API over a fake engine, in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from draftline.deploy.engine_face import LocalFace
from draftline.deploy.openai_api import create_app
from draftline.deploy.settings import ServerConfig
from support.fake_engine import FakeEngine

MODEL = "tiny"


@asynccontextmanager
async def serve(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API of `engine`; `options` are those of `ServerConfig`."""
    face = LocalFace(engine)  # pyright: ignore[reportArgumentType]
    app = create_app(face, ServerConfig(**options), MODEL)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(engine) as client:
        yield client


@pytest.fixture
def serving() -> Callable[..., Any]:
    return serve
