"""Stores in a Redis Cluster whose URL names a node that does not hold the keys."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from draftline.core.errors import StoreError
from draftline.retrieval_store.redis_store.store import RedisStore
from redis.exceptions import MovedError
from support.contracts.store_contract import A, B
from support.servers.learning_replica import Replica
from support.servers.redis_server import RedisServer
from support.servers.steady_lookups import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("redis")]

LAST_SLOT = 16383
KEY = "{draftline:retrieval}:manifest"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """The store's keys are of the second."""
    with ExitStack() as stack:
        (first, _), (second, bus_port) = (
            _start(stack, tmp_path / name) for name in ("first", "second")
        )
        slot = _ask(first, f"CLUSTER KEYSLOT {KEY}")
        _ask(first, f"CLUSTER ADDSLOTSRANGE 0 {slot - 1}")
        _ask(second, f"CLUSTER ADDSLOTSRANGE {slot} {LAST_SLOT}")
        _ask(first, f"CLUSTER MEET 127.0.0.1 {second.port} {bus_port}")
        for node in (first, second):
            wait_until(lambda node=node: "state:ok" in _state(node), "the cluster is whole")
        yield first, second


def _start(stack: ExitStack, folder: Path) -> tuple[RedisServer, int]:
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bus_port = probe.getsockname()[1]
    options = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port))
    return stack.enter_context(RedisServer(folder, *options)), bus_port


def _ask(node: RedisServer, command: str) -> Any:
    with node.raw() as client:
        return client.execute_command(*command.split())


def _state(node: RedisServer) -> str:
    with node.raw() as client:
        return "".join(
            f"{key}:{value}\n" for key, value in client.execute_command("CLUSTER INFO").items()
        )


def test_keys_of_another_node_are_found(nodes: tuple[RedisServer, RedisServer]) -> None:
    """Transactions, too: a node refuses those whose keys differ in slot, or are not its own."""
    first, second = nodes
    with first.raw() as client, pytest.raises(MovedError):
        client.get(KEY)
    store = RedisStore(first.url)
    store.change("n", add=[A, B])
    store.change("n", add=[A], remove=[B.segment_id])
    assert store.manifest().segment_ids("n") == [A.segment_id]
    assert bytes(store.get("n", A.segment_id).data) == A.data
    assert _ask(first, "DBSIZE") == 0
    assert _ask(second, "DBSIZE") > 0
    store.close()


def test_what_is_learned_goes_there_too(nodes: tuple[RedisServer, RedisServer]) -> None:
    first, second = nodes
    Replica(first.url).learn("tenant", 1, 2, 3)
    assert Replica(second.url).fresh_answer("tenant", 1, 2) == {3}


def test_keys_that_move_are_followed_at_the_next_try(
    nodes: tuple[RedisServer, RedisServer],
) -> None:
    first, second = nodes
    store = RedisStore(first.url)
    store.put("n", A)
    slot, new = _ask(first, f"CLUSTER KEYSLOT {KEY}"), _ask(first, "CLUSTER MYID")
    _ask(second, "FLUSHALL")
    for node in nodes:
        _ask(node, f"CLUSTER SETSLOT {slot} NODE {_text(new)}")
    with pytest.raises(StoreError, match="Redis refuses"):
        store.manifest()
    assert not store.manifest().written
    store.put("n", B)
    assert _ask(first, "DBSIZE") > 0
    store.close()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
