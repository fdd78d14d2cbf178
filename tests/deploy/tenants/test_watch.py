"""A server follows its store of tenants, and keeps the last good state where that fails."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from draftline.core.errors import ConfigError
from draftline.deploy import tenants as watch
from draftline.deploy.settings.settings import ServerConfig
from draftline.deploy.tenants import (
    check_tenant_store,
    create_tenant,
    open_tenant_store,
    revoke_key,
    rotate_key,
)
from support.fakes.fake_engine import FakeEngine

BODY = {"prompt": "a", "max_tokens": 2}
DEADLINE_S = 20.0


async def status(client: httpx.AsyncClient, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return (await client.post("/v1/completions", json=BODY, headers=headers)).status_code


async def until(client: httpx.AsyncClient, key: str, wanted: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await status(client, key) != wanted:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)


def spoil(path: Path) -> bytes:
    good = path.read_bytes()
    path.write_bytes(b"tenants: [")
    return good


def remove(path: Path) -> None:
    path.unlink()


def restore(path: Path, good: bytes) -> None:
    path.write_bytes(good)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch, "PERIOD_S", 0.01)
    return tmp_path / "tenants.yaml"


async def test_changes_count_without_a_restart(
    serving: Any, engine: FakeEngine, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = open_tenant_store(str(path))
    first = create_tenant(store, "acme", {"learn": False})
    assert first is not None
    async with serving(engine, api_keys=["operator"], tenant_store=str(path)) as client:
        assert await status(client, first.text) == 200
        assert await status(client, "other") == 401
        second = rotate_key(store, "acme", keep_old=False)
        await until(client, second.text, 200)
        assert await status(client, first.text) == 401
        assert engine.calls[-1][2].tenant == "acme"
        good = spoil(path)
        for _ in range(5):
            await asyncio.sleep(0.02)
            assert await status(client, second.text) == 200
        metrics = await client.get("/metrics", headers={"Authorization": "Bearer operator"})
        assert 'draftline:tenant_store_failures_total{model_name="tiny",store="tenants"}' in (
            metrics.text
        )
        remove(path)
        await asyncio.sleep(0.05)
        assert await status(client, second.text) == 200
        restore(path, good)
        revoke_key(store, "acme", None)
        await until(client, second.text, 401)
    assert "last good state stays" in caplog.text
    # What an operator did is no warning.
    changes = [one.levelname for one in caplog.records if "tenants_changed" in one.message]
    assert changes
    assert set(changes) == {"INFO"}
    assert "neither YAML nor JSON" in caplog.text
    assert second.text not in caplog.text


async def test_a_store_that_was_never_read_is_no_reason_to_refuse_a_key(
    serving: Any, engine: FakeEngine, path: Path
) -> None:
    async with serving(engine, api_keys=["operator"], tenant_store=str(path)) as client:
        assert await status(client, "operator") == 200
        assert await status(client, "other") == 503
        key = create_tenant(open_tenant_store(str(path)), "acme", {})
        assert key is not None
        await until(client, key.text, 200)
        assert await status(client, "other") == 401


async def test_a_store_may_not_take_over_a_tenant_of_the_settings(
    serving: Any, engine: FakeEngine, path: Path
) -> None:
    store = open_tenant_store(str(path))
    key = create_tenant(store, "acme", {})
    assert key is not None
    tenants = [{"name": "acme", "key_sha256": "0" * 64}]
    with pytest.raises(ConfigError, match="two are named 'acme'"):
        check_tenant_store(ServerConfig(tenants=tenants, tenant_store=str(path)))
    async with serving(engine, tenants=tenants, tenant_store=str(path)) as client:
        assert await status(client, key.text) == 503


def test_a_server_does_not_start_without_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draftline tenant create") as raised:
        check_tenant_store(ServerConfig(tenant_store=str(tmp_path / "none.yaml")))
    assert raised.value.field == "server.tenant_store"
