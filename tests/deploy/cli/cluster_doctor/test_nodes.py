"""Facts and links of nodes that are there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.cluster_doctor.link_meter import (
    NUM_BLOCKS,
    LinkServer,
    Measured,
    measure_link,
)
from draftline.deploy.cli.cluster_doctor.node_facts import PACKAGES, read_node
from draftline.deploy.cli.cluster_doctor.probe import ClusterFacts, read_cluster
from support.servers.ray_cluster import ray_nodes
from support.servers.redis_server import RedisServer

HOST = "127.0.0.1"


@pytest.mark.net
def test_a_link_is_measured() -> None:
    server = LinkServer(HOST)
    measured = measure_link(HOST, server.port, server.token)
    server.close()
    assert 0 < measured.latency_s < 1
    assert measured.bandwidth > NUM_BLOCKS


@pytest.mark.net
def test_whoever_has_no_token_is_not_served() -> None:
    server = LinkServer(HOST)
    with pytest.raises(ConnectionError):
        measure_link(HOST, server.port, bytes(len(server.token)))
    server.close()
    # One connection is all that it takes.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, server.port), 5)


def test_this_node(tmp_path: Path) -> None:
    facts = read_node(HOST, "demo", str(tmp_path / "not" / "there"), None)
    assert set(facts.versions) == {"python", *PACKAGES}
    assert facts.versions["ray"] != "none"
    assert facts.model_bytes is not None
    assert facts.model_bytes > 10**6
    assert min(facts.memory, facts.disk_free, facts.bandwidth, facts.operations) > 10**6
    assert (facts.redis_s, facts.redis) == (None, "")


@pytest.mark.redis
def test_redis_as_a_node_sees_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        found = read_node(HOST, "demo", str(tmp_path), server.url)
        assert found.redis_s is not None
    gone = read_node(HOST, "no/such/model", str(tmp_path), "redis://:hidden@127.0.0.1:1/0")
    assert (gone.redis_s, gone.redis) == (None, "ConnectionError")
    assert gone.model_bytes is None
    assert gone.problem


@pytest.mark.net
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:10001"])
def test_where_nobody_listens_the_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="address: no Ray cluster at"):
        read_cluster(address, "demo", "~/.cache", None)


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_two_nodes_of_a_cluster() -> None:
    with ray_nodes(["127.0.0.2"]) as nodes:
        facts = read_cluster(nodes.address, "demo", "~/.cache", None)
    assert isinstance(facts, ClusterFacts)
    assert not facts.silent
    assert len({node.address for node in facts.nodes}) == 2
    assert facts.nodes[1].address == "127.0.0.2"
    assert all(node.model_bytes and node.resources["CPU"] == 1 for node in facts.nodes)
    [link] = facts.links
    assert isinstance(link.measured, Measured)
