"""A hub over one drafter: in process, slowed down there, or behind a real gRPC server."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import pytest
from draftline.actors.drafter_server import DrafterServer
from draftline.cluster.drafting.hub import AnyDrafter, DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.drafting.pool import DrafterPool
from draftline.cluster.links.grpc_link import GrpcLink
from draftline.core.interfaces import Drafter
from draftline.core.proposals import FeatureLayers
from draftline.measure.simulate.cost_profile import read_cost_profile
from draftline.measure.simulate.host_clock import HostClock
from draftline.measure.simulate.slowed_drafter import DraftTimes, slowed
from support.servers.hub_session import LIMITS

# Of a drafter that takes as long as it takes, and of those that it names.
QUICK = read_cost_profile("8b-h100")
Serve = Callable[[Drafter], Awaitable[str]]


class MakeHub(Protocol):
    """Starts a hub over one drafter, to which the target hands out `features`."""

    async def __call__(
        self, drafter: Drafter, features: FeatureLayers | None = None
    ) -> DrafterHub: ...


class NoChance(random.Random):
    """Of equal servers of a pool the first is taken: a request that comes again finds its own."""

    def random(self) -> float:
        return 0.5


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


@pytest.fixture(params=["inproc", "grpc", "slowed", "pool"])
async def make_hub(request: pytest.FixtureRequest, serve: Serve) -> AsyncIterator[MakeHub]:
    """Makes started hubs over one transport."""
    hubs: list[DrafterHub] = []

    async def make(drafter: Drafter, features: FeatureLayers | None = None) -> DrafterHub:
        one: AnyDrafter
        if request.param == "grpc":
            one = GrpcLink(drafter.name, await serve(drafter), features=features)
        elif request.param == "pool":
            address = await serve(drafter)
            links = [GrpcLink(drafter.name, address, features=features) for _ in range(2)]
            one = DrafterPool(
                drafter.name, 256, True, {"a": links[0], "b": links[1]},
                reads_features=features is not None,
            )  # fmt: skip
        elif request.param == "slowed":
            own = slowed(drafter, DraftTimes(QUICK, drafter.name), HostClock())
            one = LocalDrafter(own, features=features)
        else:
            one = LocalDrafter(drafter, features=features)
        hubs.append(DrafterHub([one], LIMITS, rng=NoChance()))
        await hubs[-1].start()
        return hubs[-1]

    yield make
    for hub in hubs:
        await hub.stop()
