"""Stores of tenants: what `draftline tenant` does to them, and what servers read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.deploy.settings.tenants import key_digest
from draftline.deploy.tenants import (
    AUDIT,
    TenantStore,
    checked_tenants,
    create_tenant,
    open_tenant_store,
    revoke_key,
    rotate_key,
    set_tenant,
)
from support.servers.redis_server import RedisServer

Audit = Callable[[], list[dict[str, object]]]


@pytest.fixture(
    params=["yaml", "json", pytest.param("redis", marks=[pytest.mark.redis, pytest.mark.net])]
)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[TenantStore, Audit]]:
    """A store, and what reads its audit log."""
    if request.param == "redis":
        with RedisServer(tmp_path) as server:
            raw = server.raw()
            yield (
                open_tenant_store(server.url),
                lambda: [json.loads(entry[b"entry"]) for _, entry in raw.xrange(AUDIT)],  # pyright: ignore[reportGeneralTypeIssues]
            )
            raw.close()
        return
    path = tmp_path / f"tenants.{request.param}"
    log = Path(f"{path}.audit.jsonl")
    yield (
        open_tenant_store(str(path)),
        lambda: [json.loads(line) for line in log.read_text().splitlines()],
    )


def digests(store: TenantStore) -> dict[str, tuple[str, ...]]:
    return {one.name: one.key_sha256 for one in checked_tenants(store.read(), "store")}


def test_a_tenants_life(opened: tuple[TenantStore, Audit]) -> None:
    store, audit = opened
    first = create_tenant(store, "acme", {"requests_per_minute": 60, "models": ["demo"]})
    assert first is not None
    assert create_tenant(store, "bert", {"learn": False}, with_key=False) is None
    version = store.version()
    second = rotate_key(store, "acme", keep_old=True)
    assert store.version() != version
    assert digests(store) == {
        "acme": (first.digest, second.digest),
        "bert": (),
    }
    assert revoke_key(store, "acme", first.digest[:12]) == [first.digest]
    third = rotate_key(store, "acme", keep_old=False)
    assert digests(store)["acme"] == (third.digest,)
    set_tenant(store, "acme", {"weight": 2.0}, ["models"])
    (acme, _) = checked_tenants(store.read(), "store")
    assert (acme.weight, acme.models, acme.requests_per_minute) == (2.0, None, 60)
    assert revoke_key(store, "acme", None) == [third.digest]
    assert list(digests(store)) == ["bert"]
    entries = audit()
    assert [entry["action"] for entry in entries] == [
        "create", "create", "rotate", "revoke", "rotate", "set", "revoke",
    ]  # fmt: skip
    assert entries[2]["added"] == [second.digest[:12]]
    assert entries[4]["removed"] == [second.digest[:12]]
    assert entries[5]["changed"] == ["models", "weight"]
    assert all(entry["user"] and entry["time"] for entry in entries)
    told = json.dumps(entries) + str(store.read())
    assert not any(key.text in told for key in (first, second, third))
    assert key_digest(first.text) == first.digest


def test_what_is_wrong_changes_nothing(opened: tuple[TenantStore, Audit]) -> None:
    store, audit = opened
    create_tenant(store, "acme", {})
    before, version = store.read(), store.version()
    with pytest.raises(ConfigError, match="there already"):
        create_tenant(store, "acme", {})
    with pytest.raises(ConfigError, match="no tenant 'carl'; known: acme"):
        rotate_key(store, "carl", keep_old=False)
    with pytest.raises(ConfigError, match="first 4 or more digits"):
        revoke_key(store, "acme", "zzzz")
    with pytest.raises(StoreError, match="namespace"):
        set_tenant(store, "acme", {"namespace": "a/b"})
    with pytest.raises(StoreError, match="name"):
        create_tenant(store, "shared", {})
    assert store.read() == before
    assert store.version() == version
    assert len(audit()) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"tenants: [", "line 1: is neither YAML nor JSON"),
        (b"\xff\xfe", "is neither YAML nor JSON"),
        (b"- name: a", "must hold tenants"),
        (b"tenants:\n- name: a\n  key_env: HOME\n", "key_sha256 only"),
        (b"tenants:\n- name: a\n  reqests_per_minute: 3\n", "did you mean 'requests_per_minute'"),
        (b"tenants:\n- name: a\n- name: a\n", "two are named 'a'"),
    ],
)
def test_files_that_are_wrong_say_where(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_bytes(content)
    store = open_tenant_store(str(path))
    with pytest.raises(StoreError, match=said):
        checked_tenants(store.read(), store.where)


def test_a_file_is_the_owners_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    store = open_tenant_store(str(path))
    with pytest.raises(StoreError, match="cannot be read"):
        store.read()
    create_tenant(store, "acme", {})
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    inode = path.stat().st_ino
    set_tenant(store, "acme", {"weight": 3.0})
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_ino != inode
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "tenants.yaml", "tenants.yaml.audit.jsonl", "tenants.yaml.lock",
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["http://a", "memcached://a"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="tenant_store"):
        open_tenant_store(url)
