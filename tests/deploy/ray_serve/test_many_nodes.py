"""Stages on several nodes of a Ray cluster: where they are, and that no text depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from draftline import Engine, EngineConfig, SamplingParams
from support.servers.ray_cluster import ray_nodes, ray_serve

# Those of further nodes, as far as one machine can have some.
OTHERS = ["127.0.0.2", "127.0.0.3"]
PARAMS = {"max_tokens": 48, "temperature": 0.9, "seed": 3, "ignore_eos": True}
PROMPT = "abc def abc"
NUM_STAGES = 2
# Ray Serve's modules warn when they are imported, so they are imported in here.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ray_serve_url() -> Iterator[str]:
    """The URL of a Ray Serve on three nodes, without applications."""
    with ray_serve(ray_nodes(OTHERS, num_cpus=2)) as url:
        yield url


def nodes_of(class_name: str) -> list[str]:
    """The nodes of all living actors of a class."""
    import ray

    return [
        actor["Address"]["NodeID"]
        for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and class_name in (actor["ActorClassName"], actor["Name"])
    ]


def coordinator_node() -> str:
    import ray

    [node] = [
        actor["Address"]["NodeID"]
        for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and "draftline#engine#" in actor["Name"]
    ]
    return node


def settings(model: Path, strategy: str, cpus: float) -> dict[str, Any]:
    return {
        "model": str(model), "kv_cache_tokens": 2048, "backend": "ray", "standby_stages": 0,
        "pipeline_parallel_size": NUM_STAGES, "cpus_per_stage": cpus,
        "drafters": [{"kind": "spectra"}],
        "deployment": {
            "placement_group_strategy": strategy, "coordinator_cpus": cpus, "ingress_cpus": 0.2,
        },
    }  # fmt: skip


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strategy", "cpus", "per_node"),
    [
        # Three parts on three nodes.
        ("STRICT_SPREAD", 0.4, [1, 1, 1]),
        # All on one where it has room, else on as few as have.
        ("PACK", 0.4, [3]),
        ("PACK", 0.9, [2, 1]),
        ("STRICT_PACK", 0.4, [3]),
    ],
)
def test_stages_are_where_the_strategy_says(
    checkpoint: Path, ray_serve_url: str, strategy: str, cpus: float, per_node: list[int]
) -> None:
    from draftline.deploy.ray_serve.serve_app import build_app
    from ray import serve

    with Engine(EngineConfig(model=str(checkpoint))) as engine:
        [expected] = engine.generate([PROMPT], SamplingParams(**PARAMS))  # pyright: ignore[reportArgumentType]
    serve.run(build_app(settings(checkpoint, strategy, cpus)), name="draftline")
    try:
        stages = nodes_of("StageWorker")
        assert len(stages) == NUM_STAGES
        counts = Counter([coordinator_node(), *stages])
        assert sorted(counts.values(), reverse=True) == per_node
        with httpx.Client(base_url=ray_serve_url, timeout=120) as client:
            for speculative in (True, False):
                body = {"prompt": PROMPT, "speculative": {"enabled": speculative}, **PARAMS}
                answer = client.post("/v1/completions", json=body).raise_for_status()
                assert answer.json()["choices"][0]["text"] == expected.text
    finally:
        serve.delete("draftline")
