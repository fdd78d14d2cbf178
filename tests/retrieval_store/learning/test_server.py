from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from draftline.actors.retrieval_server import RetrievalServer
from draftline.cluster.retrieval import GrpcLookup
from draftline.core.errors import DrafterError, ProtocolError, StoreError
from draftline.core.interfaces import Ended
from draftline.retrieval_store.serving.open_store import open_policy
from draftline.retrieval_store.wire import (
    LearnMessage,
    decode_counts,
    decode_learn,
    encode_counts,
    encode_learn,
)
from support.contracts.delta_log_contract import FINGERPRINT, OTHER_MODEL
from support.inputs.segments import context
from support.servers.learning_replica import Replica

pytestmark = pytest.mark.net

ENDED = Ended("tenant", context(1, 2, 3, 4), ((1, 2), (3, 4)))


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(str(tmp_path / "store"))


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[GrpcLookup]:
    server = RetrievalServer(replica.service, learn=replica.service.learn)
    client = GrpcLookup(f"127.0.0.1:{await server.start()}", timeout_s=30)
    yield client
    client.close()
    await server.stop()


async def test_what_is_sent_is_learned(client: GrpcLookup, replica: Replica) -> None:
    counts = [await asyncio.to_thread(client.learn, ENDED, FINGERPRINT)]
    replica.service.refresh()
    counts.append(await asyncio.to_thread(client.learn, ENDED, FINGERPRINT))
    assert counts == [{"learned": 1}, {"repeated": 1}]
    found = await asyncio.to_thread(client.lookup, [context(1, 2)], ["tenant"], [4])
    assert found[0].tokens.tolist() == [3, 4]


async def test_what_the_stores_policy_forbids_is_told(
    client: GrpcLookup, replica: Replica, tmp_path: Path
) -> None:
    replica.learn("other", 1, 2, 3)
    open_policy(str(tmp_path / "store"), writes=True).switch("tenant", learns=False)
    assert await asyncio.to_thread(client.learn, ENDED, FINGERPRINT) == {"off": 1}
    assert replica.log.epochs().keys() == {"other"}


async def test_texts_of_another_model_are_refused(client: GrpcLookup, replica: Replica) -> None:
    with pytest.raises(DrafterError, match="INVALID_ARGUMENT fingerprint: the text is of another"):
        await asyncio.to_thread(client.learn, ENDED, OTHER_MODEL)
    assert replica.log.epochs() == {}


async def test_a_store_out_of_reach_is_a_drafter_error(
    client: GrpcLookup, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: object) -> None:
        raise StoreError("dead")

    monkeypatch.setattr(replica.log, "append", dead)
    with pytest.raises(DrafterError, match="UNAVAILABLE dead"):
        await asyncio.to_thread(client.learn, ENDED, FINGERPRINT)


async def test_a_server_that_does_not_learn_says_so(replica: Replica) -> None:
    server = RetrievalServer(replica.service)
    client = GrpcLookup(f"127.0.0.1:{await server.start()}", timeout_s=30)
    with pytest.raises(DrafterError, match="UNIMPLEMENTED"):
        await asyncio.to_thread(client.learn, ENDED, FINGERPRINT)
    client.close()
    await server.stop()


def test_the_wire_keeps_all() -> None:
    ended, fingerprint = decode_learn(encode_learn(ENDED, FINGERPRINT))
    assert (ended.namespace, ended.accepted, fingerprint) == ("tenant", ENDED.accepted, FINGERPRINT)
    assert ended.tokens.tolist() == ENDED.tokens.tolist()
    bare = Ended("tenant", context(1, 2, 3))
    assert decode_learn(encode_learn(bare, FINGERPRINT))[0].accepted == ()


@pytest.mark.parametrize("runs", [[0], [2, 1], [1, 1], [-1, 2], [0, 9]])
def test_bad_runs_are_refused(runs: list[int]) -> None:
    request = LearnMessage("n", bytes(16), np.array(runs, dtype="<i4").tobytes(), "", "", 9)
    with pytest.raises(ProtocolError, match="runs"):
        decode_learn(msgspec.msgpack.encode(request))


@pytest.mark.parametrize("size", [-1, 2**32])
def test_a_vocabulary_that_cannot_be_is_refused(size: int) -> None:
    request = LearnMessage("n", bytes(16), b"", "", "", size)
    with pytest.raises(ProtocolError, match=f"vocab_size: {size}"):
        decode_learn(msgspec.msgpack.encode(request))


@pytest.mark.parametrize("count", [-1, 2**32])
def test_counts_out_of_range_are_refused(count: int) -> None:
    assert decode_counts(encode_counts({"learned": 2**32 - 1})) == {"learned": 2**32 - 1}
    with pytest.raises(ProtocolError, match=f"learned: {count}"):
        decode_counts(msgspec.msgpack.encode({"failed": 1, "learned": count}))
