"""TLS, users with few rights, and passwords that no message tells."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.deploy.api.http.gate import CountingGate, TenantLimits
from draftline.deploy.cli.corpus.stats import store_stats
from draftline.retrieval_store.redis_store.store import RedisStore
from draftline.retrieval_store.serving.open_store import open_policy, open_store
from draftline.retrieval_store.serving.service import RetrievalService
from support.contracts.store_contract import A, B
from support.servers.learning_replica import Replica
from support.servers.redis_server import RedisServer
from support.servers.self_signed import self_signed_files
from support.servers.steady_lookups import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("redis")]

READER = "on >secret ~{draftline:*}:* -@all +hgetall +get"
WRITER = (
    READER + " &{draftline:*}:* +info +watch +multi +exec +hget +hexists +strlen +exists +set"
    " +unlink +persist +expire +hset +hdel +publish +subscribe"
)

LEARNER = WRITER + " +xadd +xtrim +xrange +hsetnx +evalsha +script|load +del +time"


def store_of(server: RedisServer, user: str, rights: str) -> RedisStore:
    with server.raw() as client:
        client.execute_command("ACL", "SETUSER", user, *rights.split())
    return RedisStore(f"redis://{user}:secret@127.0.0.1:{server.port}/0")


def test_few_rights_are_enough(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    writer = store_of(server, "writer", WRITER)
    reader = store_of(server, "reader", READER)
    writer.change("n", add=[A, B])
    writer.delete("n", B.segment_id)
    assert reader.get("n", A.segment_id).data == A.data
    with pytest.raises(StoreError, match="Redis refuses") as info:
        reader.put("n", B)
    with caplog.at_level(logging.DEBUG):
        writer.wait_for_change(0.01)
        # One who may not subscribe waits instead, and says so once.
        reader.wait_for_change(0.01)
        reader.wait_for_change(0.01)
    assert caplog.text.count("event=retrieval_store_polled") == 1
    assert "secret" not in str(info.value) + caplog.text + repr(reader) + reader.url
    writer.close()
    reader.close()


def test_few_rights_are_enough_to_learn(server: RedisServer) -> None:
    with server.raw() as client:
        client.execute_command("ACL", "SETUSER", "learner", *LEARNER.split())
    url = f"redis://learner:secret@127.0.0.1:{server.port}/0"
    replica = Replica(url)
    replica.learn("tenant", 1, 2, 3)
    assert replica.folder.fold("tenant", must=True)
    policy = open_policy(url, writes=True)
    policy.switch("tenant", learns=False)
    replica.learn("tenant", 1, 2, 4)
    assert policy.off() == {"tenant"}
    policy.switch("tenant", learns=True)
    replica.learn("tenant", 1, 2, 5)
    assert replica.fresh_answer("tenant", 1, 2) == {3, 5}


def test_one_who_may_not_ask_for_the_time_learns(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rights = [right for right in LEARNER.split() if right != "+time"]
    with server.raw() as client:
        client.execute_command("ACL", "SETUSER", "learner", *rights)
    replica = Replica(f"redis://learner:secret@127.0.0.1:{server.port}/0")
    Replica(server.url).learn("tenant", 1, 2, 3)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * 86_400)
    with caplog.at_level(logging.WARNING):
        for token in (4, 5):
            replica.learn("tenant", 1, 2, token)
    monkeypatch.undo()
    # By its own clock it drops nothing.
    assert Replica(server.url).fresh_answer("tenant", 1, 2) == {3, 4, 5}
    assert caplog.text.count("event=own_clock_used") == 1


def test_stats_need_no_right_to_read_what_is_learned(server: RedisServer) -> None:
    Replica(server.url).learn("tenant", 1, 2, 3)
    store_of(server, "reader", READER).close()
    url = f"redis://reader:secret@127.0.0.1:{server.port}/0"
    found, unread = store_stats(url)
    assert (found, "Redis refuses" in str(unread)) == ([], True)
    found, unread = store_stats(server.url)
    assert [(one.name, one.num_learned, unread) for one in found] == [("tenant", 1, None)]


def test_a_service_without_news_polls(server: RedisServer) -> None:
    writer = store_of(server, "writer", WRITER)
    service = RetrievalService(store_of(server, "reader", READER), poll_seconds=0.01)
    service.start()
    writer.put("shared", A)
    wait_until(lambda: service.status.num_segments == 1, "the segment is served")
    service.stop()
    writer.close()


def test_a_wrong_password_is_refused_and_not_told(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisStore(f"redis://reader:secret@127.0.0.1:{server.port}/0")
    service = RetrievalService(store, poll_seconds=0.01)
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(StoreError, match=r"^redis://127\.0\.0\.1:\d+/0: Redis") as info:
            service.refresh()
        service.start()
        service.stop()
    assert "secret" not in str(info.value) + caplog.text + service.status.last_error


def test_a_password_may_stand_in_a_file(server: RedisServer, tmp_path: Path) -> None:
    with server.raw() as client:
        client.execute_command("ACL", "SETUSER", "filed", "on", ">se/c r@t", "~*", "+@all", "&*")
    file = tmp_path / "redis password"
    file.write_text("se/c r@t\n")
    address = f"filed@127.0.0.1:{server.port}/0"
    url = f"redis://{address}?socket_timeout=3&password_file={file}"
    store = RedisStore(url)
    store.put("n", A)
    assert store.get("n", A.segment_id).data == A.data
    assert store.url == f"redis://127.0.0.1:{server.port}/0"
    store.close()

    async def counted() -> bool:
        gate = CountingGate(url, is_open=False)
        verdict = await gate.enter(TenantLimits(tenant="t", requests=2), "request")
        await gate.close()
        return not verdict.reason and verdict.rates["requests"].remaining == 1

    assert asyncio.run(counted())
    for wrong in (f"redis://{address}?password_file=absent", url.replace("@", ":pass@")):
        with pytest.raises(ConfigError, match=r"absent|two passwords"):
            open_store(wrong)
        with pytest.raises(ConfigError, match=r"absent|two passwords"):
            CountingGate(wrong)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:sec/ret@host/0",
        "redis://user:secret@host:port/0",
        "redis://user:secret@host/0?socket_timeout=x",
        "redis+other://user:secret@host/0",
        "rediss://user:secret@host/0?ssl_ca_certs=absent.pem",
    ],
)
def test_urls_that_cannot_be_used_tell_no_password(url: str) -> None:
    with pytest.raises(ConfigError, match="store") as info:
        open_store(url)
    assert "sec" not in str(info.value).replace("password", "")
    assert info.value.__suppress_context__ or "sec" not in str(info.value.__cause__)


def test_tls_asks_for_certificates(tmp_path: Path) -> None:
    with RedisServer(tmp_path, tls=self_signed_files(tmp_path)) as server:
        store = RedisStore(server.url)
        store.put("n", A)
        assert store.get("n", A.segment_id).data == A.data
        assert store.url == f"rediss://localhost:{server.port}/0"
        store.close()
        for url in (
            f"redis://localhost:{server.port}/0",
            f"rediss://localhost:{server.port}/0",
            f"rediss://localhost:{server.port}/0?ssl_ca_certs={tmp_path}/certificate.pem",
            server.url.replace("localhost", "127.0.0.1"),
        ):
            store = RedisStore(url)
            with pytest.raises(StoreError, match="Redis does not answer"):
                store.manifest()
            store.close()


def test_a_tls_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ssl_certfile: cannot read absent\.pem"):
        RedisStore("rediss://localhost/0?ssl_certfile=absent.pem")
