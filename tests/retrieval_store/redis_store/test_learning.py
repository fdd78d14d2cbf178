from __future__ import annotations

from collections.abc import Iterator

import pytest
from draftline.core.errors import StoreError
from draftline.retrieval_store.delta.delta_log import Folded
from draftline.retrieval_store.delta.settings import Fingerprint, LearningSettings
from draftline.retrieval_store.learning import forget_namespace
from draftline.retrieval_store.redis_store import delta_log as redis_delta_log
from draftline.retrieval_store.redis_store import delta_log as redis_log
from draftline.retrieval_store.redis_store.delta_log import RedisDeltaLog
from draftline.retrieval_store.serving.open_store import open_eraser, open_policy
from support.contracts.containment_contract import ContainmentContract, RedisVandal
from support.contracts.delta_log_contract import FINGERPRINT, DeltaLogContract, Make, learned
from support.contracts.forgetting_contract import ForgettingContract
from support.contracts.learning_contract import LearningContract
from support.contracts.policy_contract import PolicyContract
from support.inputs.segments import make_segment
from support.servers.learning_replica import Replica
from support.servers.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("redis")]


@pytest.fixture
def url(server: RedisServer) -> str:
    return server.url


class TestRedisDeltaLog(DeltaLogContract):
    @pytest.fixture
    def make_log(self, url: str) -> Make:
        def make(fingerprint: Fingerprint, settings: LearningSettings) -> RedisDeltaLog:
            return RedisDeltaLog(url, fingerprint, settings)

        return make


class TestRedisLearning(LearningContract, ForgettingContract, PolicyContract):
    pass


class TestRedisContainment(ContainmentContract):
    @pytest.fixture
    def vandal(self, server: RedisServer) -> Iterator[RedisVandal]:
        with server.raw() as client:
            yield RedisVandal(client)


def test_a_stream_expires_and_shares_the_stores_hash_slot(server: RedisServer, url: str) -> None:
    replica = Replica(url, LearningSettings(log_seconds=100.0))
    replica.learn("tenant", 1, 2, 3)
    with server.raw() as client:
        (key,) = client.keys("*:delta:*")
        assert 0 < client.ttl(key) <= 101
        assert all(name.startswith(b"{draftline:retrieval}:") for name in client.keys("*"))


def test_foreign_entries_of_a_stream_are_left_out(server: RedisServer, url: str) -> None:
    replica = Replica(url)
    replica.learn("tenant", 1, 2, 3)
    with server.raw() as client:
        (key,) = client.keys("*:delta:*")
        client.xadd(key, {"x": "y"})
        client.xadd(key, {"digest": "0" * 32, "weight": "many"})
        client.xadd(key, {"digest": "0" * 32, "weight": "1", "tokens": b"abc"})
    replica.learn("tenant", 1, 2, 4)
    assert replica.fresh_answer("tenant", 1, 2) == {3, 4}


def test_a_lost_lock_ends_the_fold(server: RedisServer, url: str) -> None:
    log = RedisDeltaLog(url, FINGERPRINT, LearningSettings())
    log.append("tenant", [learned(1, 2, 3)])
    with server.raw() as client, log.locked("tenant"):
        (key,) = client.keys("*:lock:*")
        client.delete(key)
        with pytest.raises(StoreError, match="lost the lock on namespace tenant"):
            log.fold("tenant", Folded(), log.read("tenant")[-1].position)
    assert len(log.read("tenant")) == 1


def test_no_key_of_a_forgotten_namespace_is_left(server: RedisServer, url: str) -> None:
    replica = Replica(url)
    with server.raw() as client:
        replica.learn("kept", 1, 2, 3)
        before = set(client.keys())
        replica.learn("tenant", 1, 2, 3)
        replica.folder.fold("tenant", must=True)
        replica.store.put("tenant", make_segment([[4, 5, 6]]))
        replica.learn("tenant", 1, 2, 4)
        # A deleted segment's chunks would stay for a minute; a forgotten one's do not.
        deleted = replica.store.put("tenant", make_segment([[7, 8, 9]]))
        replica.store.delete("tenant", deleted)
        forget_namespace(open_eraser(url), "tenant", open_policy(url, writes=True))
        manifest, policy = b"{draftline:retrieval}:manifest", b"{draftline:retrieval}:learning"
        assert set(client.keys()) - {manifest, policy} == before
        assert client.hkeys(manifest) == [b"format"]
        assert client.hgetall(policy) == {b"tenant": b"off"}


def test_a_fold_under_way_is_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_log, "LOCK_WAIT_S", 0.05)
    replica = Replica(url)
    replica.learn("tenant", 1, 2, 3)
    with replica.log.locked("tenant"), pytest.raises(StoreError, match="is being folded"):
        forget_namespace(open_eraser(url), "tenant")
    forget_namespace(open_eraser(url), "tenant")
    assert replica.fresh_answer("tenant", 1, 2) == set()


def test_a_dead_server_takes_nothing_away(server: RedisServer) -> None:
    replica = Replica(server.url)
    replica.learn("tenant", 1, 2, 3)
    replica.service.refresh()
    server.kill()
    with pytest.raises(StoreError, match="Redis does not answer"):
        replica.service.refresh()
    with pytest.raises(StoreError, match="Redis does not answer"):
        replica.learn("tenant", 1, 2, 4)
    assert replica.answer("tenant", 1, 2) == {3}


def test_namespaces_that_nobody_can_have_are_passed_over(server: RedisServer, url: str) -> None:
    replica = Replica(url)
    replica.learn("tenant", 1, 2, 3)
    with server.raw() as client:
        (key,) = client.keys("*:delta:*")
        for name in (b"a b", b"", b"\xff", b"a/b"):
            client.hset("{draftline:retrieval}:epochs", name + b"/" + FINGERPRINT.tag.encode(), "e")
            client.copy(key, key.replace(b"tenant", name))
    settings = LearningSettings(fold_entries=1)
    fresh = Replica(url, settings)
    assert fresh.fresh_answer("tenant", 1, 2) == {3}
    assert fresh.learning.fold_due() == ["tenant"]
    assert fresh.learning.segments.keys() == {"tenant"}


def test_an_endless_log_is_read_in_parts(
    server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote it without a bound."""
    monkeypatch.setattr(redis_delta_log, "PAGE", 10)
    replica = Replica(url, LearningSettings(log_entries=20))
    replica.learn("tenant", 1, 2, 3)
    with server.raw() as client:
        (key,) = client.keys("*:delta:*")
        ((_, fields),) = client.xrange(key)
        for _ in range(35):
            client.xadd(key, {"x": "y"})
        for _ in range(100):
            client.xadd(key, fields)
    log, read, after = replica.log, [], ""
    while part := log.read("tenant", after):
        assert len(part) <= 40
        read += part
        after = part[-1].position
    assert len(read) == 101
    assert log.damage.of("tenant") == 35
    assert replica.folder.fold("tenant", must=True)
    assert replica.fresh_answer("tenant", 1, 2) == {3}


def test_a_redis_that_is_full_or_only_read_fails_by_name(server: RedisServer, url: str) -> None:
    replica = Replica(url)
    replica.learn("tenant", 1, 2, 3)
    with server.raw() as client:
        client.config_set("maxmemory", 1)
        for action in (
            lambda: replica.learn("tenant", 1, 2, 4),
            lambda: replica.folder.fold("tenant", must=True),
        ):
            with pytest.raises(StoreError, match="reached its maxmemory"):
                action()
        client.config_set("maxmemory", 0)
        client.replicaof("127.0.0.1", 1)
        with pytest.raises(StoreError, match="Redis refuses"):
            replica.learn("tenant", 1, 2, 4)
        client.replicaof("NO", "ONE")
    replica.learn("tenant", 1, 2, 4)
    assert replica.folder.fold("tenant", must=True)
    assert replica.fresh_answer("tenant", 1, 2) == {3, 4}


def test_texts_of_a_time_to_come_are_kept_and_forgotten_like_others(
    server: RedisServer, url: str
) -> None:
    """As of a server whose clock was ahead."""
    replica = Replica(url)
    replica.learn("tenant", 1, 2, 3)
    with server.raw() as client:
        (key,) = client.keys("*:delta:*")
        ((position, fields),) = client.xrange(key)
        client.xadd(key, fields, id=f"{int(position.split(b'-')[0]) + 10**9}-0")
    replica.learn("tenant", 1, 2, 4)
    assert replica.fresh_answer("tenant", 1, 2) == {3, 4}
    assert replica.folder.fold("tenant", must=True)
    weights = replica.log.folded("tenant").weights
    assert sorted(round(weight, 2) for weight in weights.values()) == [1.0, 2.0]
