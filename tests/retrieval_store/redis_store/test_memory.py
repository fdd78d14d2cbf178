"""Uploads that Redis has no room for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from draftline.core.errors import StoreError
from draftline.retrieval_store.redis_store import store as redis_store
from draftline.retrieval_store.redis_store.store import RedisStore
from support.contracts.store_contract import A
from support.inputs.segments import make_segment
from support.servers.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("redis")]

TOKENS = np.random.default_rng(0).integers(32, size=100_000).tolist()
LARGE = make_segment([TOKENS])
SIZE = len(LARGE.data)


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(server.url)
    yield store
    store.close()


def leave_room(server: RedisServer, num_bytes: int, policy: str = "noeviction") -> None:
    with server.raw() as client:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", used + num_bytes)
        client.config_set("maxmemory-policy", policy)


def num_keys(server: RedisServer) -> int:
    with server.raw() as client:
        return client.dbsize()


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-ttl"])
def test_what_does_not_fit_is_refused_before_it_is_sent(
    server: RedisServer, store: RedisStore, policy: str
) -> None:
    store.put("n", A)
    before = num_keys(server)
    leave_room(server, SIZE, policy)
    with pytest.raises(StoreError, match=rf"of maxmemory \d+ \(maxmemory-policy {policy}\)"):
        store.put("n", LARGE)
    assert store.manifest().segment_ids("n") == [A.segment_id]
    assert store.get("n", A.segment_id).data == A.data
    assert num_keys(server) == before
    leave_room(server, 8 * SIZE, policy)
    store.put("n", LARGE)
    assert store.get("n", LARGE.segment_id).data == LARGE.data


def test_two_segments_that_fit_one_by_one_only_are_refused(
    server: RedisServer, store: RedisStore
) -> None:
    other = make_segment([TOKENS[::-1]])
    # Each takes its size twice while it is written.
    leave_room(server, 2 * SIZE + 2**20 + SIZE // 2)
    with pytest.raises(StoreError, match="maxmemory"):
        store.change("n", add=[LARGE, other])
    assert num_keys(server) == 0
    store.put("n", LARGE)


def test_room_that_others_take_meanwhile_ends_the_upload(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("n", A)
    before = num_keys(server)
    monkeypatch.setattr(redis_store, "CHUNK_BYTES", SIZE // 8)
    seal, sealed = redis_store.seal, []

    def seal_and_fill(payload: bytes) -> bytes:
        sealed.append(payload)
        if len(sealed) == 4:
            leave_room(server, 1000)
        return seal(payload)

    monkeypatch.setattr(redis_store, "seal", seal_and_fill)
    with pytest.raises(StoreError, match="maxmemory"):
        store.put("n", LARGE)
    assert len(sealed) == 4
    # The four chunks do not stay to fill it.
    assert num_keys(server) == before
    assert store.manifest().segment_ids("n") == [A.segment_id]


def test_one_who_may_not_ask_is_told_when_redis_refuses(server: RedisServer) -> None:
    with server.raw() as client:
        client.execute_command("ACL", "SETUSER", "blind", "on", "nopass", "~*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", "blind", "-info")
    leave_room(server, -1)
    store = RedisStore(f"redis://blind:any@127.0.0.1:{server.port}/0")
    with pytest.raises(StoreError, match="maxmemory"):
        store.put("n", A)
    assert not store.manifest().written
    store.close()


def test_a_policy_that_may_evict_segments_is_warned_of(
    server: RedisServer, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store.put("n", A)
        assert caplog.text == ""
        leave_room(server, 2**25, "allkeys-lru")
        store.put("n", A)
    assert "maxmemory-policy=allkeys-lru" in caplog.text


def test_evicted_chunks_are_not_listed(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = store._switch

    def lose_and_switch(*arguments: object) -> None:
        with server.raw() as client:
            (key,) = client.keys("*:chunk:*")
            client.delete(key)
        switch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_switch", lose_and_switch)
    with pytest.raises(StoreError, match="lost parts of this upload"):
        store.put("n", A)
    assert not store.manifest().written
