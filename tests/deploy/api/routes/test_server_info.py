"""What operators ask a server, and what it says of routes that it does not have."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest
from draftline import __version__
from draftline.cluster.config import EngineConfig
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.api.routes.operations import without_secrets
from draftline.deploy.settings.settings import ServerConfig
from pydantic import SecretStr
from support.fakes.fake_engine import FakeEngine


async def test_server_info_has_settings_and_no_secrets() -> None:
    server = ServerConfig(
        api_keys=("op-secret-key",),
        tenants=({"name": "team", "key_sha256": "ab" * 32},),  # pyright: ignore[reportArgumentType]
    )
    engine = EngineConfig(model="demo", kv_cache_tokens=4096)
    app = create_app(LocalEngineClient(FakeEngine()), server, "tiny", engine=engine)  # pyright: ignore[reportArgumentType]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        assert (await client.get("/server_info")).status_code == 401
        key = {"authorization": "Bearer op-secret-key"}
        response = await client.get("/server_info", headers=key)
    assert response.status_code == 200
    info = response.json()
    assert info["version"] == __version__
    assert {"python", "torch", "ray"} <= info["versions"].keys()
    assert info["engine"]["kv_cache_tokens"] == 4096
    assert info["server"]["tenants"][0]["name"] == "team"
    assert "op-secret-key" not in response.text
    assert "ab" * 32 not in response.text
    assert info["engines"][0]["num_running"] == 0


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"api_key": "k", "max_num_batched_tokens": 7, "ignore_eos": True, "n": None},
         {"api_key": "***", "max_num_batched_tokens": 7, "ignore_eos": True, "n": None}),
        ({"store": "redis://me:pw@host:1/0"}, {"store": "redis://***@host:1/0"}),
        ({"store": "redis://host:1/0?a=b@c"}, {"store": "redis://host:1/0?a=b@c"}),
        ({"keys": ["a", "b"]}, {"keys": ["***", "***"]}),
        ({"auth_token": "t", "inner": {"Password": "p", "tokenizer": "x"}},
         {"auth_token": "***", "inner": {"Password": "***", "tokenizer": "x"}}),
        ({"other": SecretStr("s")}, {"other": "***"}),
    ],
)  # fmt: skip
def test_secrets_are_hidden(given: dict[str, Any], shown: dict[str, Any]) -> None:
    assert without_secrets(given) == shown


@pytest.mark.parametrize("path", ["/server_info", "/load"])
async def test_tenants_learn_nothing_of_each_other(serving: Any, path: str) -> None:
    options = {
        "api_keys": ("operator",),
        "tenants": ({"name": "team", "key_sha256": hashlib.sha256(b"team").hexdigest()},),
    }
    async with serving(FakeEngine(), **options) as client:
        for key, status in (("operator", 200), ("team", 403)):
            response = await client.get(path, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == status


async def test_load_counts_what_runs_and_waits(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/load")).json()
    assert answer == {"server_load": 0, "num_running": 0, "num_waiting": 0}


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/embeddings", "embeddings: not served"),
        ("POST", "/v1/audio/transcriptions", "audio: not served"),
        ("POST", "/v1/images/generations", "images: not served"),
        ("POST", "/rerank", "reranking: not served"),
        ("GET", "/v1/files", "files: not served"),
        ("GET", "/v1/nowhere", "there is no GET '/v1/nowhere'"),
    ],
)
async def test_a_route_that_is_not_there(
    client: httpx.AsyncClient, method: str, path: str, hint: str
) -> None:
    response = await client.request(method, path)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["type"] == "NotFoundError"
    assert hint in error["message"]
    assert "/v1/chat/completions" in error["message"]
