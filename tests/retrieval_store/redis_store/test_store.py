from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.retrieval_store.redis_store import store as redis_store
from draftline.retrieval_store.redis_store.store import RedisStore
from draftline.retrieval_store.serving.open_store import open_store, shown_store
from support.contracts.store_contract import A, B, StoreContract
from support.servers.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("redis")]


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(server.url)
    yield store
    store.close()


@pytest.fixture
def second_store(server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(server.url)
    yield store
    store.close()


class TestRedisStore(StoreContract):
    pass


@pytest.mark.parametrize("chunk", [64, 1000, len(A.data), len(A.data) - 1, len(A.data) // 2])
def test_segments_are_cut_in_chunks(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(redis_store, "CHUNK_BYTES", chunk)
    segment_id = store.put("n", A)
    assert store.get("n", segment_id).data == A.data
    with server.raw() as client:
        keys = client.keys("*:chunk:*")
        assert len(keys) == len(A.data) // chunk + 1
        assert {client.ttl(key) for key in keys} == {-1}
        store.delete("n", segment_id)
        assert all(0 < client.ttl(key) <= redis_store.GRACE_SECONDS for key in keys)


def test_keys_share_one_hash_slot(store: RedisStore, server: RedisServer) -> None:
    store.put("n", A)
    with server.raw() as client:
        keys = client.keys()
        assert keys
        assert all(key.startswith(b"{draftline:retrieval}:") for key in keys)


def test_lost_and_corrupt_chunks_are_reported(store: RedisStore, server: RedisServer) -> None:
    segment_id = store.put("n", A)
    with server.raw() as client:
        (key,) = client.keys("*:chunk:*")
        client.setrange(key, 200, b"\xff")
        with pytest.raises(StoreError, match=f"n/{segment_id}: "):
            store.get("n", segment_id)
        client.delete(key)
        with pytest.raises(StoreError, match="not stored, or incomplete"):
            store.get("n", segment_id)
    store.put("n", A)
    assert store.get("n", segment_id).data == A.data


def test_an_upload_that_died_lists_nothing_and_expires(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_switch", die)
    with pytest.raises(KeyboardInterrupt):
        store.put("n", A)
    assert store.manifest().sizes == {}
    with server.raw() as client:
        (key,) = client.keys()
        assert 0 < client.ttl(key) <= redis_store.UPLOAD_SECONDS


def test_a_change_ends_the_wait(store: RedisStore, second_store: RedisStore) -> None:
    store.wait_for_change(0.01)
    store.wait_for_change(0.01)
    returned = threading.Event()

    def wait() -> None:
        store.wait_for_change(100.0)
        returned.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    second_store.put("n", A)
    assert returned.wait(timeout=30)
    waiter.join()


def test_an_absent_server_is_named_without_the_password() -> None:
    store = RedisStore("redis://user:secret@127.0.0.1:1/0", timeout=0.2)
    for call in (store.manifest, lambda: store.put("n", A)):
        with pytest.raises(StoreError, match=r"redis://127\.0\.0\.1:1/0: Redis does not") as info:
            call()
        assert "secret" not in str(info.value)
    store.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("demo", "demo"),
        ("/home/me/stores/refined", "refined"),
        ("file:///home/me/refined/", "refined"),
        ("redis://me:secret@host:6390/2?x=y", "redis://host:6390/2"),
        ("unix://me:secret@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_reports_tell_no_secret(url: str, shown: str) -> None:
    assert shown_store(url) == shown


def test_urls() -> None:
    store = open_store("redis://127.0.0.1:6390/2")
    assert store.url == "redis://127.0.0.1:6390/2"
    with pytest.raises(ConfigError, match="store: not a Redis URL"):
        open_store("redis://127.0.0.1:6390/2?socket_timeout=x")


def test_two_stores_of_one_server_are_apart(server: RedisServer) -> None:
    one, two = RedisStore(server.url, name="one"), RedisStore(server.url, name="two")
    one.put("n", B)
    assert np.array_equal(one.get("n", B.segment_id).text, B.text)
    assert two.manifest().sizes == {}
    one.close()
    two.close()
