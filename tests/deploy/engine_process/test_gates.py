"""Limits of tenants are counted once for all API processes, and a lost process holds no place."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from draftline.deploy.api.http.gate import TenantLimits
from draftline.deploy.api.http.metrics import ServerMetrics
from draftline.deploy.engine_process import client as client_module
from draftline.deploy.engine_process.client import EngineMetrics, SocketEngineClient, SocketGate
from draftline.deploy.engine_process.server import EngineServer
from support.fakes.fake_engine import engine_stats
from support.servers.http_server import until

pytestmark = pytest.mark.net
LIMITS = TenantLimits(tenant="acme", requests=10_000, tokens=100, concurrency=2)


class IdleEngine:
    """An engine that is asked for nothing but stats."""

    max_model_len = 100
    capacity = 4

    def is_healthy(self) -> bool:
        return True

    def stats(self) -> Any:
        return engine_stats()


async def connected(server: EngineServer, model: str) -> SocketEngineClient:
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    await server.connect(here)
    client = SocketEngineClient(there, model)
    await client.start()
    return client


async def test_api_processes_count_together(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = IdleEngine()
    server = EngineServer(engine, ServerMetrics("tiny"))
    server.loaded()
    await server.gate.start()
    clients = [await connected(server, str(checkpoint)) for _ in range(2)]
    one, other = (SocketGate(client, is_open=False) for client in clients)
    assert (await one.enter(LIMITS, "a")).is_allowed
    assert (await other.enter(LIMITS, "b")).is_allowed
    assert (await other.enter(LIMITS, "c")).reason == "concurrency"
    # Its process ends without a word.
    clients[0]._connection.abort()
    async with asyncio.timeout(20):
        while not (await other.enter(LIMITS, "d")).is_allowed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await other.take_tokens(LIMITS, 60)).rates["tokens"].remaining == 40
    refused = await other.take_tokens(LIMITS, 60)
    assert (refused.reason, refused.limit) == ("tokens", 100)
    metrics = EngineMetrics(clients[1])
    metrics.refused("acme", "tokens")
    metrics.store_failed("tenants")
    page = (await metrics.text(clients[1])).decode()
    assert 'tenant_refusals_total{model_name="tiny",reason="tokens",tenant="acme"} 1.0' in page
    assert 'tenant_store_failures_total{model_name="tiny",store="tenants"} 1.0' in page
    assert 'draftline:tenant_requests_total{engine="0",model_name="tiny",tenant="acme"} 3.0' in page
    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(server.gate, "enter", lambda *_: asyncio.sleep(60))
    assert (await other.enter(LIMITS, "e")).reason == "unavailable"
    assert (await SocketGate(clients[1], is_open=True).enter(LIMITS, "e")).is_allowed
    for client in clients:
        await client.close()
    server.close()
    await until(lambda: not server._sessions)
    await server.gate.close()
