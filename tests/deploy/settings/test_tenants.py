"""Tenants: their settings, and whose each request is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import httpx
import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.settings.settings import ServerConfig, build_serve_args
from draftline.deploy.settings.tenants import TenantConfig, key_digest
from support.fakes.fake_engine import FakeEngine

DIGEST = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
TENANTS = [
    {"name": "a", "key_sha256": [key_digest("key a"), key_digest("schl\u00fcssel")]},
    {"name": "b", "key_sha256": key_digest("key b"), "learn": False},
]


def test_a_digest_is_what_sha256sum_says() -> None:
    assert key_digest("secret") == DIGEST


def test_keys_come_from_digests_variables_and_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KEY_OF_A", "one")
    (tmp_path / "keys").write_text("two\n\n  three \n")
    tenant = TenantConfig(
        name="a",
        key_sha256=DIGEST.upper(),
        key_env=["KEY_OF_A"],
        key_file=str(tmp_path / "keys"),
        learn=False,
    )
    assert tenant.key_sha256 == (DIGEST, *map(key_digest, ("one", "two", "three")))
    assert not tenant.learn
    # Ray sends it on; where it arrives there is no such variable.
    monkeypatch.delenv("KEY_OF_A")
    config = ServerConfig(tenants=(tenant,))
    again = pickle.loads(pickle.dumps(config))
    assert again.tenants == (tenant,)
    for told in (repr(config), str(config.model_dump()), pickle.dumps(config).decode("latin-1")):
        assert "three" not in told


@pytest.mark.parametrize(
    ("tenants", "field", "hint"),
    [
        ([{"name": "a"}], "[0].key_sha256", "give one of key_sha256, key_env, key_file"),
        ([{"key_sha256": DIGEST}], "[0].name", "required"),
        ([{"name": "a", "key": "secret"}], "[0].key", "unknown key 'key'"),
        ([{"name": "a", "key_sha256": "secret"}], "[0].key_sha256", "sha256sum"),
        ([{"name": "a", "key_sha256": 5}], "[0].key_sha256", "a text or a list"),
        ([{"name": "a", "key_sha256": [""]}], "[0].key_sha256", "none of them empty"),
        ([{"name": "a", "key_env": "NO_SUCH_KEY"}], "[0].key_env", "NO_SUCH_KEY is not set"),
        ([{"name": "a", "key_file": "absent"}], "[0].key_file", "cannot read absent"),
        ([{"name": "a/b", "key_sha256": DIGEST}], "[0].name", "letters, digits"),
        ([{"name": "shared", "key_sha256": DIGEST}], "[0].name", "server.api_keys"),
        ([{"name": "a", "key_sha256": DIGEST, "learn": 3}], "[0].learn", "boolean"),
        ([{"name": "a", "key_sha256": DIGEST}] * 2, "", "two are named 'a'"),
        (
            [{"name": "a", "key_sha256": DIGEST}, {"name": "b", "key_sha256": DIGEST}],
            "",
            "'b' has a key of 'a'",
        ),
        ([{"name": "a", "key_sha256": key_digest("api")}], "", "'a' has a key of 'api_keys'"),
    ],
)
def test_wrong_tenants(tenants: list[dict[str, Any]], field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_serve_args({"server": {"tenants": tenants, "api_keys": ["api"]}})
    assert caught.value.field == f"server.tenants{field}"
    assert hint in caught.value.message
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\xfe"])
def test_key_files_without_a_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match="key_file"):
        TenantConfig(name="a", key_file=str(tmp_path / "keys"))


def test_an_error_tells_no_key_of_the_operator() -> None:
    with pytest.raises(ConfigError, match="none of them empty") as caught:
        ServerConfig(api_keys=("operators own", ""))
    assert "operators" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "namespace", "store"),
    [
        ("operator", "shared", True),
        ("key a", "a", True),
        ("schl\u00fcssel", "a", True),
        ("key b", "b", False),
    ],
)
async def test_the_key_says_whose_a_request_is(
    serving: Any, engine: FakeEngine, key: str, namespace: str, store: bool
) -> None:
    header = {"Authorization": f"Bearer {key}".encode()}
    async with serving(engine, api_keys=("operator",), tenants=TENANTS) as client:
        sent = {"prompt": "a"}, {"prompt": "a", "store": False}, {"prompt": "a", "stream": True}
        for body in sent:
            answer = await client.post("/v1/completions", json=body, headers=header)
            assert answer.status_code == 200
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert (
            await client.post("/v1/chat/completions", json=chat, headers=header)
        ).status_code == 200
    options = [call[2] for call in engine.calls]
    assert [one.namespace for one in options] == [namespace] * 4
    assert [one.store for one in options] == [store, False, store, store]


async def test_without_keys_all_is_shared(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for header in ({}, {"Authorization": "Bearer key a"}):
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=header)
        assert answer.status_code == 200
    assert [call[2].namespace for call in engine.calls] == ["shared"] * 2


@pytest.mark.parametrize(
    "header", ["", "Bearer ", "Bearer a", "Bearer key", "key a", f"Bearer {key_digest('key a')}"]
)
async def test_other_keys_are_refused(serving: Any, engine: FakeEngine, header: str) -> None:
    async with serving(engine, tenants=TENANTS) as client:
        headers = {"Authorization": header} if header else {}
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "AuthenticationError"
    assert engine.calls == []


@pytest.mark.parametrize("name", ["namespace", "tenant", "learn"])
async def test_a_body_names_no_namespace(serving: Any, engine: FakeEngine, name: str) -> None:
    async with serving(engine, tenants=TENANTS) as client:
        answer = await client.post(
            "/v1/completions",
            json={"prompt": "a", name: "b"},
            headers={"Authorization": "Bearer key a", "x-tenant-id": "b"},
        )
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]
    assert engine.calls == []


async def test_metrics_are_for_the_operator(serving: Any, engine: FakeEngine) -> None:
    async with serving(engine, api_keys=("operator",), tenants=TENANTS) as client:
        for path in ("/v1/models", "/version", "/metrics"):
            allowed = path != "/metrics"
            answer = await client.get(path, headers={"Authorization": "Bearer key a"})
            assert answer.status_code == (200 if allowed else 403)
            own = await client.get(path, headers={"Authorization": "Bearer operator"})
            assert own.status_code == 200
        refused = await client.get("/metrics", headers={"Authorization": "Bearer key b"})
        assert refused.json()["error"]["type"] == "PermissionDeniedError"


@pytest.mark.parametrize(
    ("key", "lowest"), [("key a", -5), ("key b", 0), ("operator", -9)], ids=["a", "b", "operator"]
)
async def test_priority_is_what_a_key_allows(
    serving: Any, engine: FakeEngine, key: str, lowest: int
) -> None:
    tenants = [TENANTS[0] | {"min_priority": -5}, TENANTS[1]]
    headers = {"Authorization": f"Bearer {key}"}
    async with serving(engine, tenants=tenants, api_keys=["operator"], min_priority=-9) as client:
        for priority in (lowest, 0, 7, None):
            body = {"prompt": "a", "priority": priority}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
        assert [call[2].priority for call in engine.calls] == [lowest, 0, 7, 0]
        for path, prompt in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            body = prompt | {"priority": lowest - 1}
            response = await client.post(path, json=body, headers=headers)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "priority"
            assert f"from {lowest} to" in error["message"]
    assert len(engine.calls) == 4


async def test_without_keys_nobody_goes_before_others(serving: Any, engine: FakeEngine) -> None:
    async with serving(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "priority": -1})
        assert response.status_code == 400
        response = await client.post("/v1/completions", json={"prompt": "a", "priority": 1})
        assert response.status_code == 200
    async with serving(engine, min_priority=-1) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "priority": -1})
        assert response.status_code == 200
