"""Redis and the network fail in every way while lookups go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import redis
from draftline.core.errors import StoreError
from draftline.retrieval_store.redis_store import store as redis_store
from draftline.retrieval_store.redis_store.store import RedisStore
from draftline.retrieval_store.serving.service import RetrievalService
from support.inputs.segments import context, make_segment
from support.servers.redis_server import RedisServer
from support.servers.steady_lookups import answer, steady_lookups, wait_until
from support.servers.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("redis")]

OLD, NEW, OTHER = (make_segment([[1, 2, token]]) for token in (10, 11, 12))
LASTING = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def writer(server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(server.url)
    yield store
    store.close()


def followed(url: str) -> RetrievalService:
    service = RetrievalService(RedisStore(url, timeout=0.2), poll_seconds=0.05)
    service.refresh()
    service.start()
    return service


@pytest.mark.parametrize("server", [LASTING], indirect=True)
def test_a_restart_with_its_data_loses_nothing(server: RedisServer, writer: RedisStore) -> None:
    writer.put("shared", OLD)
    service = followed(server.url)
    with steady_lookups(service) as lookups:
        writer.change("shared", add=[NEW], remove=[OLD.segment_id])
        server.kill()
        wait_until(lambda: service.status.num_failures > 0, "the loss is noticed")
        assert answer(service) in ({10}, {11})
        server.start()
        wait_until(lambda: answer(service) == {11}, "what was committed is served")
        wait_until(lambda: service.status.num_failures == 0, "the store is followed again")
        writer.put("shared", OTHER)
        wait_until(lambda: answer(service) == {11, 12}, "changes are followed again")
    service.stop()
    assert lookups.failures == []
    assert {frozenset({11, 12}), *lookups.seen} == {
        frozenset(tokens) for tokens in ({10}, {11}, {11, 12})
    }


def test_a_restart_from_an_older_snapshot_is_followed(
    server: RedisServer, writer: RedisStore
) -> None:
    writer.put("shared", OLD)
    with server.raw() as client:
        client.save()
    writer.change("shared", add=[NEW], remove=[OLD.segment_id])
    service = followed(server.url)
    with steady_lookups(service) as lookups:
        server.kill()
        server.start()
        wait_until(lambda: answer(service) == {10}, "what Redis holds is served")
    service.stop()
    assert lookups.failures == []
    assert lookups.seen in ([{11}, {10}], [{11}])


def test_a_restart_without_data_takes_nothing_away(server: RedisServer, writer: RedisStore) -> None:
    writer.put("shared", OLD)
    service = followed(server.url)
    with steady_lookups(service) as lookups:
        server.kill()
        server.start()
        wait_until(lambda: "lost its data" in service.status.last_error, "the loss is noticed")
        assert answer(service) == {10}
        writer.put("shared", NEW)
        wait_until(lambda: answer(service) == {11}, "the refilled store is followed")
    service.stop()
    assert lookups.failures == []
    assert lookups.seen in ([{10}, {11}], [{10}])


def test_a_restart_without_data_during_an_upload_lists_nothing(
    server: RedisServer, writer: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "CHUNK_BYTES", 64)
    sealed: list[bytes] = []
    seal = redis_store.seal

    def seal_and_restart(payload: bytes) -> bytes:
        sealed.append(payload)
        if len(sealed) == 3:
            server.kill()
            server.start()
        return seal(payload)

    monkeypatch.setattr(redis_store, "seal", seal_and_restart)
    with pytest.raises(StoreError, match="lost parts of this upload; try again"):
        writer.put("shared", NEW)
    assert not writer.manifest().written
    writer.put("shared", NEW)
    assert writer.get("shared", NEW.segment_id).data == NEW.data


@pytest.mark.parametrize("break_network", [TcpProxy.cut, TcpProxy.stall])
def test_a_broken_network_is_outlived(
    server: RedisServer, writer: RedisStore, break_network: object
) -> None:
    assert callable(break_network)
    writer.put("shared", OLD)
    network = TcpProxy(server.port)
    service = followed(f"redis://127.0.0.1:{network.port}/0")
    with steady_lookups(service) as lookups:
        break_network(network)
        writer.change("shared", add=[NEW], remove=[OLD.segment_id])
        wait_until(lambda: service.status.num_failures > 1, "the loss is noticed")
        assert "Redis does not answer" in service.status.last_error
        assert answer(service) == {10}
        network.mend()
        wait_until(lambda: answer(service) == {11}, "the store is followed again")
    service.stop()
    network.close()
    assert lookups.failures == []
    assert lookups.seen in ([{10}, {11}], [{10}])


def test_a_network_broken_during_an_upload_lists_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "CHUNK_BYTES", 64)
    network = TcpProxy(server.port)
    store = RedisStore(f"redis://127.0.0.1:{network.port}/0", timeout=0.2)
    sealed: list[bytes] = []
    seal = redis_store.seal

    def seal_and_cut(payload: bytes) -> bytes:
        sealed.append(payload)
        if len(sealed) == 3:
            network.cut()
        return seal(payload)

    monkeypatch.setattr(redis_store, "seal", seal_and_cut)
    with pytest.raises(StoreError, match="Redis does not answer"):
        store.put("shared", NEW)
    network.mend()
    assert not store.manifest().written
    with server.raw() as client:
        assert all(client.ttl(key) > 0 for key in client.scan_iter())
    store.put("shared", NEW)
    assert store.get("shared", NEW.segment_id).data == NEW.data
    store.close()
    network.close()


def flip(client: redis.Redis, key: bytes) -> None:
    client.setrange(key, 100, bytes([client.getrange(key, 100, 100)[0] ^ 1]))


def cut_short(client: redis.Redis, key: bytes) -> None:
    value = client.get(key)
    assert isinstance(value, bytes)
    client.set(key, value[:-1])


def make_a_list(client: redis.Redis, key: bytes) -> None:
    client.delete(key)
    client.rpush(key, "x")


def swap(client: redis.Redis, key: bytes) -> None:
    """Another whole segment, sound in itself."""
    client.set(key, redis_store.seal(bytes(OTHER.data)))


GARBAGE = [flip, cut_short, make_a_list, swap, lambda client, key: client.set(key, b"")]


@pytest.mark.parametrize("spoil", GARBAGE)
def test_garbage_is_refused_counted_and_told(
    server: RedisServer, writer: RedisStore, spoil: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(spoil)
    writer.put("shared", OLD)
    service = RetrievalService(RedisStore(server.url), poll_seconds=0.05)
    service.refresh()
    # Nobody tells the service before the chunk is spoilt.
    writer.change("shared", add=[NEW], remove=[OLD.segment_id])
    with server.raw() as client:
        spoil(client, b"{draftline:retrieval}:chunk:shared:%s:0" % NEW.segment_id.encode())
    # One that is damaged stops nothing else, and so raises nothing.
    with caplog.at_level(logging.WARNING):
        service.refresh()
    assert answer(service) == {10}
    assert f"segment=shared/{NEW.segment_id}" in caplog.text
    status = service.status
    assert status.refused == (f"shared/{NEW.segment_id}",)
    assert (status.num_refusals, status.num_failures, status.num_segments) == (1, 1, 1)
    assert status.last_error
    service.start()
    with server.raw() as client:
        client.delete(b"{draftline:retrieval}:chunk:shared:%s:0" % NEW.segment_id.encode())
    writer.put("shared", NEW)
    wait_until(lambda: answer(service) == {11}, "the mended segment is served")
    wait_until(lambda: service.status.refused == (), "nothing is refused")
    service.stop()


def test_a_spoilt_size_takes_nothing_away(server: RedisServer, writer: RedisStore) -> None:
    writer.put("shared", OLD)
    writer.put("shared", OTHER)
    service = RetrievalService(RedisStore(server.url))
    service.refresh()
    with server.raw() as client:
        client.hset("{draftline:retrieval}:manifest", f"shared/{OLD.segment_id}", "9" * 40)
    service.refresh()
    assert answer(service) == {10, 12}
    assert service.status.num_refusals == 1
    service.refresh()
    assert service.status.num_refusals == 1
    writer.delete("shared", OLD.segment_id)
    service.refresh()
    assert answer(service) == {12}
    assert service.status.refused == ()
    service.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [("../x/" + "0" * 32, "1"), ("shared/zz", "1"), ("shared/" + "0" * 32, "many"), ("x", "1")],
)
def test_a_spoilt_manifest_takes_nothing_away(
    server: RedisServer, writer: RedisStore, field: str, value: str
) -> None:
    writer.put("shared", OLD)
    service = RetrievalService(RedisStore(server.url))
    service.refresh()
    with server.raw() as client:
        client.hset("{draftline:retrieval}:manifest", field, value)
        writer.put("tenant", NEW)
        service.refresh()
        assert answer(service) == {10}
        # Others are followed.
        found = service.lookup([context(1, 2)], ["tenant"], [8])[0].tokens
        assert set(found.tolist()) == {10, 11}
        assert "manifest is corrupt" in service.status.last_error
        assert service.status.refused == (f"{field}/" if field == "x" else field,)
        client.hdel("{draftline:retrieval}:manifest", field)
        client.hset("{draftline:retrieval}:manifest", "format", "1")
    with pytest.raises(StoreError, match="format 1, this draftline reads 2"):
        service.refresh()
    with pytest.raises(StoreError, match="format 1, this draftline reads 2"):
        writer.put("shared", NEW)
    assert answer(service) == {10}
    service.stop()
