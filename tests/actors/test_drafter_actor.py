"""A drafter on Ray: it dies, Ray starts it anew, the hub finds it again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
from draftline.actors import drafter_actor
from draftline.actors.drafter_actor import RayDrafter, spawn_drafter
from draftline.cluster.config import DrafterConfig
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.links.grpc_link import GrpcLink, GrpcOptions
from draftline.core.errors import DrafterError, DraftlineError
from support.servers.hub_session import QUICK_RETRY, Rhyme, until
from support.servers.processes import drafter_actor_pids, send_signal
from support.servers.ray_cluster import ray_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


async def has_moved(drafter: RayDrafter, address: str) -> bool:
    try:
        return await drafter.address() != address
    except DrafterError:
        # Ray is still starting it.
        return False


async def test_a_killed_actor_comes_back_at_a_new_address_for_those_with_its_token():
    config = DrafterConfig(kind="prompt_lookup", name="far", num_matches=1)
    drafter = spawn_drafter(config, num_cpus=0.5)
    first = await asyncio.wait_for(drafter.address(), 60)
    link = GrpcLink("far", drafter.address, GrpcOptions(token=drafter.token))
    hub = DrafterHub([link], QUICK_RETRY)
    await hub.start(timeout_s=60.0)
    rhyme = Rhyme(hub)
    await until(rhyme.step)
    stranger = DrafterHub([GrpcLink("far", drafter.address)], QUICK_RETRY)
    await stranger.start(timeout_s=60.0)
    assert not stranger.stats()[0].connected
    await stranger.stop()
    ray.kill(drafter.actor, no_restart=False)
    await until(rhyme.is_silent)
    await until(rhyme.step, pause_s=0.1)
    await until(lambda: has_moved(drafter, first), pause_s=0.1)
    assert hub.stats()[0].reconnects >= 1
    await hub.stop()


async def test_a_paused_actor_is_replaced_and_proposals_come_again(monkeypatch):
    monkeypatch.setattr(drafter_actor, "PING_TIMEOUT_S", 1.0)
    config = DrafterConfig(kind="prompt_lookup", name="far", num_matches=1)
    drafter = spawn_drafter(config, num_cpus=0.5)
    options = GrpcOptions(connect_timeout_s=0.5, token=drafter.token)
    link = GrpcLink("far", drafter.address, options, replace=drafter.replace)
    hub = DrafterHub([link], replace(QUICK_RETRY, answer_timeout_s=0.5))
    await hub.start(timeout_s=60.0)
    rhyme = Rhyme(hub)
    await until(rhyme.step)
    paused = drafter_actor_pids()[-1]
    send_signal(paused, signal.SIGSTOP)
    await until(rhyme.is_silent)
    async with asyncio.timeout(60):
        await until(rhyme.step, pause_s=0.1)
    # Ray ends a process that is stopped some seconds after it was asked to.
    async with asyncio.timeout(30):
        while paused in drafter_actor_pids():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.1)
    await hub.stop()


async def test_an_actor_that_cannot_build_its_drafter_says_why():
    config = DrafterConfig.model_validate({"kind": "retrieval", "store": "/nowhere/store"})
    drafter = spawn_drafter(config, num_cpus=0.5)
    with pytest.raises(DraftlineError, match="/nowhere/store"):
        await asyncio.wait_for(drafter.address(), 60)
