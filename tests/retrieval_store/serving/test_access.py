"""A retrieval server gives nobody what their token is not for, and learns nothing of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from draftline.actors.retrieval_server import RetrievalServer
from draftline.cluster.config import DrafterConfig
from draftline.cluster.drafting.factory import build_drafter
from draftline.cluster.links.access import Access, Scope, token_metadata
from draftline.cluster.retrieval import FORGET_S, DeniedNamespaces, GrpcLookup
from draftline.core.errors import DrafterError
from draftline.core.interfaces import Ended
from draftline.core.proposals import DraftRequest, Query
from draftline.retrieval_store.search.lookup import SegmentLookup
from draftline.retrieval_store.wire import METHOD, encode_request
from support.contracts.delta_log_contract import FINGERPRINT
from support.fakes.fake_link import FakeClock
from support.inputs.segments import context, make_segment
from support.servers.learning_replica import Replica
from support.servers.self_signed import self_signed_files

pytestmark = pytest.mark.net

# Constant, since tests are named after them: workers must collect the same.
ENGINE, ACME = "token-of-the-engine", "token-of-tenant-acme"
ACCESS = Access([(ENGINE, Scope()), (ACME, Scope(frozenset({"acme", "acme-2"})))])
LOOKUP = SegmentLookup(
    {
        "shared": [make_segment([[1, 2, 3]])],
        "acme": [make_segment([[1, 2, 4]])],
        "bert": [make_segment([[1, 2, 5]])],
    }
)
NAMES = ["acme", "bert", "shared", "carl"]
ARGUMENTS = ([context(1, 2)] * 4, NAMES, [8] * 4)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = RetrievalServer(LOOKUP, access=ACCESS)
    yield f"127.0.0.1:{await server.start()}"
    await server.stop()


async def found(address: str, token: str | None) -> list[set[int]]:
    client = GrpcLookup(address, timeout_s=30, token=token)
    try:
        subtrees = await asyncio.to_thread(client.lookup, *ARGUMENTS)
    finally:
        client.close()
    return [set(subtree.tokens.tolist()) for subtree in subtrees]


async def test_the_engines_token_reads_everything(address: str) -> None:
    assert await found(address, ENGINE) == [{3, 4}, {3, 5}, {3}, {3}]


async def test_a_tenants_token_reads_its_own_and_what_is_shared(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await found(address, ACME) == [{3, 4}, set(), {3}, set()]
    denied = [record.message for record in caplog.records if "namespace_denied" in record.message]
    assert len(denied) == 2
    assert all("--token-file" in line for line in denied)
    assert "namespace=bert" in "".join(denied)
    assert ACME not in caplog.text


async def test_a_denied_namespace_is_asked_for_and_said_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = GrpcLookup(address, timeout_s=30, token=ACME)
    for _ in range(5):
        (subtree,) = await asyncio.to_thread(client.lookup, [context(1, 2)], ["bert"], [8])
        assert not len(subtree.tokens)
    client.close()
    assert caplog.text.count("namespace_denied") == 1


@pytest.mark.parametrize("token", [None, "token-of-a-stranger"])
async def test_strangers_are_refused_and_told_the_setting(address: str, token: str | None) -> None:
    with pytest.raises(DrafterError, match=r"UNAUTHENTICATED .*token_env or token_file"):
        await found(address, token)


async def test_what_is_no_namespace_is_denied_without_a_name(address: str) -> None:
    strange = encode_request([context(1, 2)], ["../bert\n"], [8])
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(strange, timeout=30, metadata=token_metadata(ACME))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    client = GrpcLookup(address, timeout_s=30, token=ACME)
    with pytest.raises(DrafterError, match="PERMISSION_DENIED"):
        await asyncio.to_thread(client.lookup, [context(1, 2)], ["../bert\n"], [8])
    client.close()


@pytest.mark.parametrize(
    ("token", "namespace", "is_allowed"),
    [
        (ACME, "acme", True),
        (ACME, "bert", False),
        (ACME, "shared", False),
        (ENGINE, "bert", True),
        (None, "acme", False),
    ],
)
async def test_only_listed_namespaces_are_learned(
    tmp_path: Path, token: str | None, namespace: str, is_allowed: bool
) -> None:
    replica = Replica(str(tmp_path / "store"))
    server = RetrievalServer(replica.service, access=ACCESS, learn=replica.service.learn)
    client = GrpcLookup(f"127.0.0.1:{await server.start()}", timeout_s=30, token=token)
    ended = Ended(namespace, context(1, 2, 3, 4))
    if is_allowed:
        assert await asyncio.to_thread(client.learn, ended, FINGERPRINT) == {"learned": 1}
        assert replica.log.epochs().keys() == {namespace}
    else:
        with pytest.raises(DrafterError, match=r"PERMISSION_DENIED|UNAUTHENTICATED"):
            await asyncio.to_thread(client.learn, ended, FINGERPRINT)
        assert replica.log.epochs() == {}
    client.close()
    await server.stop()


async def test_a_retrieval_drafter_is_given_tls_and_token_by_its_settings(tmp_path: Path) -> None:
    files = self_signed_files(tmp_path)
    server = RetrievalServer(LOOKUP, tls=files, access=ACCESS)
    token_file = tmp_path / "token"
    token_file.write_text(f"{ENGINE} *\n")
    drafter = build_drafter(
        DrafterConfig(
            kind="retrieval",
            # The certificate names localhost.
            server=f"127.0.0.1:{await server.start()}",
            tls_ca=files.ca,
            tls_certificate=files.certificate,
            tls_key=files.key,
            tls_server_name="localhost",
            token_file=str(token_file),
        )
    )
    drafter.open(DraftRequest("r", context(1, 2), 2, 0.0, 1, "bert"))

    def propose() -> set[int]:
        # The connection is made in the background; until then the lookup is late.
        for _ in range(200):
            try:
                return set(drafter.propose([Query("r", 2, 8)])[0].tokens.tolist())
            except DrafterError:
                continue
        raise AssertionError("the server is never reached")

    assert await asyncio.to_thread(propose) == {3, 5}
    await server.stop()


def test_a_denied_namespace_is_asked_for_again_later(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    denied = DeniedNamespaces("here:1", clock)
    names = ["a", "b", "a"]
    assert denied.allowed(names) == [0, 1, 2]
    assert denied.add(["a"])
    assert not denied.add(["a"])
    assert denied.allowed(names) == [1]
    clock.now += FORGET_S
    assert denied.allowed(names) == [0, 1, 2]
    assert denied.add(["a"])
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
