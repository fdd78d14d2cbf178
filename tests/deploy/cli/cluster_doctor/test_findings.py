"""What is said of clusters that only exist on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.cluster_doctor.checks import checks
from draftline.deploy.cli.cluster_doctor.command import (
    ClusterQuestion,
    findings,
    redis_url,
)
from draftline.deploy.cli.cluster_doctor.expectations import (
    expectations,
    machinery,
    slowest_link,
)
from draftline.deploy.cli.cluster_doctor.link_meter import Measured
from draftline.deploy.cli.cluster_doctor.node_facts import Gpu, NodeFacts, read_gpus
from draftline.deploy.cli.cluster_doctor.probe import ClusterFacts, LinkFacts, pairs_of
from draftline.deploy.cli.doctor import Finding
from draftline.measure.simulate.devices import GIB
from draftline.measure.simulate.sizing_table import TARGETS

SMALL, _, LARGE = TARGETS
VERSIONS = {"python": "3.12.1", "draftline": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}
NEAR = Measured(latency_s=50e-6, bandwidth=12e9)
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 0.0)
L4 = Gpu("NVIDIA L4", 24 * GIB, 0.0)


def node(number: int, *gpus: Gpu, **changes: Any) -> NodeFacts:
    fields: dict[str, Any] = {
        "address": f"10.0.0.{number}",
        "host": f"node-{number}",
        "versions": VERSIONS,
        "cpus": 16,
        "memory": 100 * GIB,
        "disk_free": 200 * GIB,
        "bandwidth": 20e9,
        "operations": 1e12,
        "gpus": gpus,
        "model_bytes": 10**9,
        "resources": {"CPU": 16.0, "GPU": float(len(gpus))},
    }
    return NodeFacts(**fields | changes)


def cluster(*nodes: NodeFacts, measured: Measured | None = NEAR, problem: str = "") -> ClusterFacts:
    links = [LinkFacts(*pair, measured, problem) for pair in pairs_of(len(nodes))]
    return ClusterFacts(nodes, tuple(links))


def wrong(found: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.text for finding in found if not finding.ok}


def test_a_good_cluster_has_no_fault() -> None:
    found = [*checks(cluster(node(1, H100), node(2, H100)), "8B")]
    assert not wrong(found)
    assert len(found) == 2 + len(VERSIONS) + 1 + 2


def test_another_version_is_named_with_its_node() -> None:
    other = node(2, versions=VERSIONS | {"ray": "2.59.0"})
    found = wrong([*checks(cluster(node(1), other), "8B")])
    assert list(found) == ["ray"]
    assert "install ray 2.60.0 on 10.0.0.2" in found["ray"]


def test_a_node_without_the_model_and_one_without_disk() -> None:
    lacking = node(1, model_bytes=None, problem="no such folder: /models/8B")
    full = node(2, disk_free=1 * GIB)
    found = wrong([*checks(cluster(lacking, full), "8B")])
    assert list(found) == ["8B on 10.0.0.1", "8B on 10.0.0.2"]
    assert "no such folder" in found["8B on 10.0.0.1"]
    assert "1 GiB of disk free" in found["8B on 10.0.0.2"]


def test_links_that_are_slow_thin_or_closed() -> None:
    nodes = (node(1), node(2))
    far = wrong([*checks(cluster(*nodes, measured=Measured(20e-3, 12e9)), "8B")])
    assert "one zone" in far["link 10.0.0.1 - 10.0.0.2"]
    thin = wrong([*checks(cluster(*nodes, measured=Measured(50e-6, 1e8)), "8B")])
    assert "faster network" in thin["link 10.0.0.1 - 10.0.0.2"]
    closed = wrong([*checks(cluster(*nodes, measured=None, problem="timed out"), "8B")])
    assert "timed out: open all ports" in closed["link 10.0.0.1 - 10.0.0.2"]


def test_a_node_that_is_silent() -> None:
    facts = replace(cluster(node(1)), silent={"10.0.0.9": "No module named 'draftline'"})
    found = [*checks(facts, "8B")]
    assert wrong(found) == {"node 10.0.0.9": "does not answer: No module named 'draftline'"}


def test_redis_that_is_away_or_far() -> None:
    found = [*checks(cluster(node(1, redis="ConnectionError"), node(2, redis_s=0.2)), "8B")]
    assert set(wrong(found)) == {"Redis from 10.0.0.1", "Redis from 10.0.0.2"}
    assert [one.needed for one in found if not one.ok] == [True, False]


def test_gpus_that_are_in_use_and_of_two_kinds() -> None:
    busy = replace(H100, used=40 * GIB)
    found = wrong([*checks(cluster(node(1, busy), node(2, L4)), "8B")])
    assert set(found) == {"kinds of GPUs", "memory of 10.0.0.1"}


def test_gpus_are_read_from_the_drivers_lines() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, 4\nNVIDIA A100, 40GB, 40960, 100\nslice, [N/A], [N/A]\n"
    assert read_gpus(text) == (
        Gpu("NVIDIA H100 80GB HBM3", 81559 * 2.0**20, 4 * 2.0**20),
        Gpu("NVIDIA A100, 40GB", 40960 * 2.0**20, 100 * 2.0**20),
    )
    assert read_gpus("") == ()


def test_all_stages_wait_for_the_slowest() -> None:
    facts = cluster(node(1, H100, H100), node(2, L4))
    found = machinery(facts)
    assert found is not None
    assert (found.name, found.count, found.within) == ("L4", 3, 2)
    assert found.memory == L4.memory
    links = (LinkFacts(0, 1, Measured(1e-3, 5e9)), LinkFacts(0, 2, Measured(1e-4, 1e9)))
    link = slowest_link(replace(facts, links=links))
    assert link is not None
    assert (link.latency_s, link.bandwidth) == (1e-3, 1e9)


def said(facts: ClusterFacts, stages: int | None = None, target: Any = LARGE) -> dict[str, Finding]:
    return {one.subject: one for one in expectations(facts, target, stages, 2048)}


def test_as_few_stages_as_have_room_and_where() -> None:
    near = said(cluster(node(1, *[H100] * 4)))
    assert "pipeline_parallel_size: 2, on one node" in near["stages"].text
    assert "STRICT_PACK" in near["stages"].text
    apart = said(cluster(*(node(number, H100) for number in (1, 2, 3, 4))))
    assert "each on a node of its own (placement_group_strategy: PACK)" in apart["stages"].text
    assert "x for one request" in apart["speculation"].text


def test_a_far_node_shows_in_the_step() -> None:
    nodes = [node(number, H100) for number in (1, 2)]
    near, far = (said(cluster(*nodes, measured=Measured(one, 12e9))) for one in (5e-5, 2e-2))
    assert near["messages"].ok
    assert not far["messages"].ok
    ms = [float(one["step"].text.split(" ms")[0]) for one in (near, far)]
    assert ms[1] - ms[0] == pytest.approx(40, abs=0.5)


def test_no_room_says_what_to_do() -> None:
    found = said(cluster(node(1, L4)))
    assert list(found) == ["room"]
    assert not found["room"].ok
    assert "pipeline_parallel_size" in found["room"].text


def test_what_is_not_known_is_not_predicted() -> None:
    found = said(cluster(node(1, Gpu("Some GPU", 10 * GIB, 0))))
    assert list(found) == ["prediction"]
    assert "Some GPU" in found["prediction"].text


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="stages: must be 1 to 2"):
        said(cluster(node(1, H100), node(2, H100)), stages=3)


def test_cpus_are_measured_and_the_bundled_model_fits() -> None:
    question = ClusterQuestion(
        address="auto", model="demo", redis_env=None, stages=None, context=512
    )
    found = findings(cluster(node(1), node(2)), question)
    assert not wrong(found)
    by_subject = {one.subject: one.text for one in found}
    assert "pipeline_parallel_size: 1, on one node" in by_subject["stages"]
    assert "kv_cache_tokens" in by_subject["KV"]


def test_a_url_is_read_from_the_environment() -> None:
    assert redis_url(None, {}) is None
    assert redis_url("STORE", {"STORE": "redis://one"}) == "redis://one"
    with pytest.raises(ConfigError, match="redis-env: the environment variable STORE"):
        redis_url("STORE", {})


def test_every_pair_of_few_nodes_and_a_ring_of_many() -> None:
    assert pairs_of(1) == []
    assert len(pairs_of(5)) == 10
    many = pairs_of(50)
    assert len(many) == 49 + 48
    assert {place for pair in many for place in pair} == set(range(50))
