"""Limits that replicas share over Redis, and what happens where it is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from draftline.deploy.api.http import gate as gate_module
from draftline.deploy.api.http.gate import CountingGate, TenantLimits
from redis.asyncio import Redis
from support.servers.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.net]
LIMITS = TenantLimits(tenant="acme", requests=4, tokens=100, concurrency=2)


@asynccontextmanager
async def gates(url: str, count: int = 2, **options: bool) -> AsyncIterator[list[CountingGate]]:
    opened = [CountingGate(url, **options) for _ in range(count)]
    for gate in opened:
        await gate.start()
    try:
        yield opened
    finally:
        for gate in opened:
            await gate.close()


async def test_replicas_count_together(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with gates(server.url) as (one, other):
            assert (await one.enter(LIMITS, "a")).is_allowed
            assert (await other.enter(LIMITS, "b")).is_allowed
            refused = await one.enter(LIMITS, "c")
            assert refused.reason == "concurrency"
            other.leave(LIMITS, "b")
            await asyncio.gather(*other._leaving)
            last = await one.enter(LIMITS, "d")
            assert last.is_allowed
            assert last.rates["requests"].remaining == 0
            assert (await other.enter(LIMITS, "e")).reason == "requests"
            assert (await one.take_tokens(LIMITS, 60)).rates["tokens"].remaining == 40
            other.charge(LIMITS, 70)
            await other._flush()
            over = await one.take_tokens(LIMITS, 1)
            assert over.reason == "tokens"
            assert over.rates["tokens"].remaining == 0
            assert over.wait_s > 0


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "PERIOD_S", 0.2)
    monkeypatch.setattr(gate_module, "LEASE_S", 3)
    monkeypatch.setattr(gate_module, "RENEWAL_S", 0.1)


@pytest.mark.usefixtures("short_leases")
async def test_places_of_a_replica_that_died_are_free_again(tmp_path: Path) -> None:
    limits = TenantLimits(tenant="acme", concurrency=2)
    with RedisServer(tmp_path) as server:
        async with gates(server.url) as (living, other):
            dead = CountingGate(server.url)
            assert (await dead.enter(limits, "dead")).is_allowed
            assert (await living.enter(limits, "a")).is_allowed
            assert (await other.enter(limits, "b")).reason == "concurrency"
            async with asyncio.timeout(20):
                while not (await other.enter(limits, "b")).is_allowed:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            # That of the living one was renewed.
            assert (await other.enter(limits, "c")).reason == "concurrency"
            await dead.close()


@pytest.mark.usefixtures("short_leases")
async def test_places_of_requests_that_end_without_redis_are_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis hangs as a request ends: its place is not renewed for as long as the server lives."""
    limits = TenantLimits(tenant="acme", concurrency=2)
    with RedisServer(tmp_path) as server:
        async with gates(server.url, 1) as (gate,):
            for name in ("a", "b"):
                assert (await gate.enter(limits, name)).is_allowed
            assert not await _free(server.url)
            monkeypatch.setattr(gate, "_paused_until", time.monotonic() + 1.0)
            for name in ("a", "b"):
                gate.leave(limits, name)
            await asyncio.gather(*gate._leaving)
            async with asyncio.timeout(20):
                while not await _free(server.url):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


async def _free(url: str) -> bool:
    """Whether Redis knows of no place, one whose lease has ended included."""
    async with Redis.from_url(url) as client:
        return not await client.exists("draftline:places:acme")


@pytest.mark.parametrize("is_open", [True, False])
async def test_without_redis_requests_go_on_or_are_refused_at_once(
    tmp_path: Path, is_open: bool
) -> None:
    failures: list[str] = []
    server = RedisServer(tmp_path)
    server.start()
    gate = CountingGate(server.url, is_open=is_open, on_failure=lambda: failures.append("x"))
    await gate.start()
    assert (await gate.enter(LIMITS, "a")).is_allowed
    server.kill()
    began = time.monotonic()
    for number in range(50):
        verdict = await gate.enter(LIMITS, f"r{number}")
        assert verdict.reason == ("" if is_open else "unavailable")
        assert (await gate.take_tokens(LIMITS, 5)).is_allowed == is_open
        gate.charge(LIMITS, 3)
        gate.leave(LIMITS, f"r{number}")
    # They did not all wait for it: it is asked once a second.
    assert time.monotonic() - began < 10
    assert 1 <= len(failures) <= 10
    server.start()
    async with asyncio.timeout(20):
        while not (await gate.enter(LIMITS, "late")).rates:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.1)
    server.kill()
    await gate.close()


async def test_a_redis_that_hangs_holds_nobody_up() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with gates(f"redis://127.0.0.1:{port}/0", 1) as (gate,):
        began = time.monotonic()
        assert (await gate.enter(LIMITS, "a")).is_allowed
        assert (await gate.enter(LIMITS, "b")).is_allowed
        assert time.monotonic() - began < 5
    listener.close()
    await listener.wait_closed()
