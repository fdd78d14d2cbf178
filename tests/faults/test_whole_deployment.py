"""`serve run deploy/70b.yaml`, with small models in place of large ones: all parts, and the loss of
each of them.

In this order, and of one deployment: it takes its time to start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from support.servers.processes import coordinator_pids, pool_server_pids, stage_pids
from support.servers.whole_deployment import PASSWORD, Deployment, deployment, until

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    with deployment(folder, num_documents=8, num_tokens=400) as running:
        yield running


@pytest.fixture(scope="module")
def plain(deployed: Deployment) -> list[str]:
    return [deployed.text(index, drafts=False) for index in range(4)]


def test_every_part_drafts_and_texts_are_those_of_plain_decoding(
    deployed: Deployment, plain: list[str]
) -> None:
    until(lambda: len(pool_server_pids("drafters")) == 1, "no drafter server")
    until(lambda: len(pool_server_pids("retrieval")) == 2, "no retrieval servers")
    asked: dict[str, float] = {}
    for _ in range(20):
        assert deployed.texts(4) == plain
        asked = deployed.values("draftline:drafter_proposals_total")
        if {name for name, count in asked.items() if count} >= deployed.drafters:
            break
    assert {name for name, count in asked.items() if count} >= deployed.drafters, asked
    with deployed.redis.client(
        deployed.redis.url.replace("redis://", f"redis://:{PASSWORD}@")
    ) as client:
        assert client.xlen("draftline:usage"), "no record of a request"


@pytest.mark.parametrize(
    "pids",
    [
        stage_pids,
        coordinator_pids,
        lambda: pool_server_pids("drafters"),
        lambda: pool_server_pids("retrieval"),
    ],
    ids=["stage", "engine", "drafter server", "retrieval server"],
)
def test_the_loss_of_a_process_changes_no_text(
    deployed: Deployment, plain: list[str], pids: Callable[[], list[int]]
) -> None:
    until(pids, "nobody is there")
    before = set(pids())
    victim = min(before)
    assert deployed.texts(4, lambda: os.kill(victim, signal.SIGKILL)) == plain
    # The loss of a stage is noticed by the next step.
    assert deployed.texts(4) == plain
    until(lambda: set(pids()) - before and victim not in pids(), "it is not replaced")
    assert deployed.texts(4) == plain


def test_without_redis_the_texts_stay_and_with_it_again_tenants_too(
    deployed: Deployment, plain: list[str]
) -> None:
    assert deployed.texts(4, deployed.redis.kill) == plain
    assert deployed.texts(2) == plain[:2]
    deployed.redis.start()
    assert deployed.texts(4) == plain


def test_a_replica_joins_under_load_and_leaves_again(
    deployed: Deployment, plain: list[str]
) -> None:
    until(lambda: len(coordinator_pids()) == 1, "it does not begin with one")
    found: list[list[str]] = []

    def load() -> bool:
        found.append(deployed.texts(24))
        return len(coordinator_pids()) == 2

    until(load, "it does not grow")
    found.append(deployed.texts(24))
    assert {tuple(texts[:4]) for texts in found} == {tuple(plain)}
    until(lambda: len(coordinator_pids()) == 1, "it does not shrink")
    assert deployed.texts(4) == plain
