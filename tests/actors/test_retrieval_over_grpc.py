"""Drafter servers over a store: tenants apart, what they learn, replicas that are killed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from draftline.actors.drafter_server import main
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.factory import build_drafter
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.pool import DrafterPool
from draftline.cluster.links.grpc_link import GrpcLink
from draftline.cluster.links.link import DrafterLink
from draftline.core.arrays import ROOT
from draftline.core.interfaces import Drafter
from draftline.core.proposals import DraftRequest, Query, StepCommit
from draftline.retrieval_store.directory_store.store import DirectoryStore
from draftline.retrieval_store.serving.open_store import open_policy
from support.inputs.segments import context, make_segment
from support.servers.hub_session import LIMITS, QUICK_RETRY, Rhyme, until

pytestmark = pytest.mark.net

PROMPT, ANSWER = (7, 3, 1, 2), (9, 4, 6)
Serve = Callable[[Drafter], Awaitable[str]]


class Asker:
    """Requests of several namespaces at one server."""

    def __init__(self, address: str) -> None:
        self.hub = DrafterHub([GrpcLink("far", address)], LIMITS, budget_s=5.0)
        self._count = 0

    async def drafted(self, namespace: str, *, store: bool = True) -> set[int]:
        """What may follow the prompt, by a request that then ends with the answer."""
        self._count += 1
        name, length = f"{namespace}-{self._count}", len(PROMPT)
        self.hub.open(
            DraftRequest(name, context(*PROMPT), length, 0.0, 1, namespace=namespace, store=store)
        )
        found = await self.hub.exchange([], [Query(name, length, 8)])
        commit = StepCommit(name, length, np.array(ANSWER, dtype=np.int32))
        await self.hub.exchange([commit], [Query(name, length + len(ANSWER), 8)])
        self.hub.close(name)
        return {
            token
            for proposal in found[name]
            for token in proposal.tokens[proposal.parents == ROOT].tolist()
        }

    @property
    def outcomes(self) -> dict[str, int]:
        """What became of the requests, as far as the server has told."""
        return {name: count for name, count in self.hub.stats()[0].learning.items() if count}


@pytest.fixture
async def ask(serve: Serve) -> AsyncIterator[Callable[[Drafter], Awaitable[Asker]]]:
    askers: list[Asker] = []

    async def ask_one(drafter: Drafter) -> Asker:
        askers.append(Asker(await serve(drafter)))
        await askers[-1].hub.start()
        return askers[-1]

    yield ask_one
    for asker in askers:
        await asker.hub.stop()


async def test_a_request_is_drafted_for_from_its_namespace_and_what_is_shared(ask, tmp_path: Path):
    store = DirectoryStore(tmp_path)
    for namespace, token in (("shared", 9), ("acme", 10), ("bert", 11)):
        store.put(namespace, make_segment([[*PROMPT, token], [*PROMPT, token]]))
    config = DrafterConfig(kind="retrieval", name="far", store=str(tmp_path))
    asker = await ask(build_drafter(config))
    found = {name: await asker.drafted(name) for name in ("acme", "bert", "carl", "shared")}
    assert found == {"acme": {9, 10}, "bert": {9, 11}, "carl": {9}, "shared": {9}}
    assert asker.outcomes == {}, "it was not told to learn"


async def test_what_ended_requests_said_is_learned_for_their_tenants(ask, tmp_path: Path):
    url = str(tmp_path)
    config = DrafterConfig(kind="retrieval", name="far", store=url, learn=True, learn_off=["off"])
    asker = await ask(build_drafter(config, EngineConfig(model="demo")))
    open_policy(url, writes=True).switch("quiet", learns=False)
    for namespace in ("quiet", "off", "shared"):
        assert await asker.drafted(namespace) == set()
    assert await asker.drafted("acme", store=False) == set()

    async def is_drafted() -> bool:
        return await asker.drafted("acme") == {ANSWER[0]}

    await until(is_drafted)

    async def is_told() -> bool:
        await asker.drafted("acme", store=False)
        told = asker.outcomes
        return (told.get("off"), told.get("shared")) == (2, 1) and "unstored" in told

    await until(is_told)
    assert asker.outcomes["learned"] >= 1
    for namespace in ("quiet", "off", "shared", "bert"):
        assert await asker.drafted(namespace) == set()


def test_a_store_of_another_tokenizer_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    DirectoryStore(tmp_path).put("shared", make_segment([[1, 2, 3]]))
    config = json.dumps({"kind": "retrieval", "store": str(tmp_path)})
    assert main(["--config", config, "--target", "demo"]) == 2
    told = capsys.readouterr()
    assert "tokenizer_hash is tokenizer, the served model has" in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)


async def test_drafts_outlive_every_server_in_turn(start_process, tmp_path: Path):
    DirectoryStore(tmp_path).put("shared", make_segment([[3, 1, 4, 1, 5, 9, 2, 6] * 8]))
    config = {"kind": "retrieval", "name": "far", "store": str(tmp_path)}
    (first, port), (second, other_port) = [await start_process(config, 0) for _ in range(2)]
    links: dict[str, DrafterLink] = {
        str(one): GrpcLink("far", f"127.0.0.1:{one}") for one in (port, other_port)
    }
    hub = DrafterHub([DrafterPool("far", 256, True, links)], QUICK_RETRY)
    await hub.start()
    rhyme = Rhyme(hub)

    async def go_on(num_servers: int) -> None:
        """Wait for so many servers, and then for drafts of some steps."""

        async def are_there() -> bool:
            await rhyme.step()
            return hub.stats()[0].servers == num_servers

        await until(are_there)
        for _ in range(20):
            await until(rhyme.step)

    await go_on(2)
    first.kill()
    await go_on(1)
    first, _ = await start_process(config, port)
    await go_on(2)
    second.kill()
    await go_on(1)
    await hub.stop()
    first.terminate()
    assert await first.communicate() == (b"", b"")
    assert first.returncode == 0
