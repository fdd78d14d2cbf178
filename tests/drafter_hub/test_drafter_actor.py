"""A drafter on Ray: it dies, Ray starts it anew, the hub finds it again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
from draftline.actors.drafter_actor import spawn_drafter
from draftline.cluster.config import DrafterConfig
from draftline.cluster.drafter_hub import DrafterHub
from draftline.cluster.grpc_link import GrpcLink, GrpcOptions
from draftline.core.errors import DraftlineError
from support.hub_session import QUICK_RETRY, Rhyme, until
from support.ray_cluster import ray_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


async def test_a_killed_actor_comes_back_at_a_new_address():
    config = DrafterConfig(kind="prompt_lookup", name="far", num_matches=1)
    drafter = spawn_drafter(config, num_cpus=0.5)
    first = await asyncio.wait_for(drafter.address(), 60)
    link = GrpcLink("far", drafter.address, GrpcOptions(token=drafter.token))
    hub = DrafterHub([link], QUICK_RETRY)
    await hub.start(timeout_s=60.0)
    rhyme = Rhyme(hub)
    await until(rhyme.step)
    ray.kill(drafter.actor, no_restart=False)
    await until(rhyme.is_silent)
    await until(rhyme.step, pause_s=0.1)
    assert await drafter.address() != first
    assert hub.stats()[0].reconnects >= 1
    await hub.stop()


async def test_an_actor_that_cannot_build_its_drafter_says_why():
    config = DrafterConfig.model_validate({"kind": "retrieval", "store": "/nowhere/store"})
    drafter = spawn_drafter(config, num_cpus=0.5)
    with pytest.raises(DraftlineError, match="/nowhere/store"):
        await asyncio.wait_for(drafter.address(), 60)
