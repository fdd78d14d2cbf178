"""A hub over one drafter: in process, slowed down there, or behind a real gRPC server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from draftline.actors.drafter_server import DrafterServer
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.links.grpc_link import GrpcLink
from draftline.cluster.links.link import InprocLink
from draftline.core.interfaces import Drafter
from draftline.measure.simulate.cost_profile import read_cost_profile
from draftline.measure.simulate.slowed_link import SlowedLink
from support.servers.hub_session import LIMITS

# Of a drafter that takes as long as it takes, and of those that it names.
QUICK = read_cost_profile("8b-h100").model_copy(update={"slowdown": 1.0})
MakeHub = Callable[[Drafter], Awaitable[DrafterHub]]
Serve = Callable[[Drafter], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves drafters over gRPC; gives their addresses."""
    servers: list[DrafterServer] = []

    async def serve_one(drafter: Drafter) -> str:
        servers.append(DrafterServer(drafter))
        return f"127.0.0.1:{await servers[-1].start()}"

    yield serve_one
    for server in servers:
        await server.stop()


@pytest.fixture(params=["inproc", "grpc", "slowed"])
async def make_hub(request: pytest.FixtureRequest, serve: Serve) -> AsyncIterator[MakeHub]:
    """Makes started hubs over one transport."""
    hubs: list[DrafterHub] = []

    async def make(drafter: Drafter) -> DrafterHub:
        link = InprocLink(drafter)
        if request.param == "grpc":
            link = GrpcLink(drafter.name, await serve(drafter))
        if request.param == "slowed":
            link = SlowedLink(link, drafter.name, QUICK)
        hubs.append(DrafterHub([link], LIMITS))
        await hubs[-1].start()
        return hubs[-1]

    yield make
    for hub in hubs:
        await hub.stop()
