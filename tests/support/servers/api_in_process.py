"""A real engine behind the API, in this process and without a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from draftline import AsyncEngine, DrafterConfig, EngineConfig
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.settings.settings import ServerConfig

DRAFTERS = tuple(
    DrafterConfig(kind=kind) for kind in ("prompt_lookup", "suffix", "token_recycling", "spectra")
)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the model in `folder`, with drafts in every step; `settings` of the engine."""
    given = {"drafters": DRAFTERS, "node_budget": "full", **settings}
    engine = AsyncEngine(EngineConfig(model=str(folder), **given))
    app = create_app(LocalEngineClient(engine), ServerConfig(), "tiny")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


def streamed_choices(response: httpx.Response) -> list[dict[str, Any]]:
    """The choice of each chunk of a streamed answer."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
