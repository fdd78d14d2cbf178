"""A client that goes away cancels its request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine


class Client:
    """An ASGI client that sends one request and can hang up."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self.gone = asyncio.Event()
        self.got_body = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.got_body.set()


SCOPE = {
    "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
    "query_string": b"", "headers": [], "asgi": {"version": "3.0", "spec_version": "2.4"},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_disconnect_cancels(stream: bool, prompt: Any) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    engine_client = LocalEngineClient(engine)  # pyright: ignore[reportArgumentType]
    app = create_app(engine_client, ServerConfig(), "tiny")
    client = Client({"prompt": prompt, "stream": stream})
    async with app.router.lifespan_context(app):
        request = asyncio.create_task(app(dict(SCOPE), client.receive, client.send))
        if stream:
            await client.got_body.wait()
        for _ in prompt:
            await engine.arrivals.get()
        assert engine.cancelled == []
        client.gone.set()
        await asyncio.wait({request})
        assert len(engine.cancelled) == len(prompt)
        assert engine.stats().num_running == 0
    assert engine.closed
