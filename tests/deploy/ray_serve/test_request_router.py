"""Ray Serve's router interface over replicas that only have ids, and over two real ones."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from draftline import SamplingParams
from draftline.core.request.sampling_params import RequestOptions

# Ray Serve's modules warn when they are imported, so they are imported in here.
pytestmark = pytest.mark.filterwarnings("ignore")


def pending(prompt: tuple[int, ...], request_id: str, **options: Any) -> Any:
    from ray.serve.request_router import PendingRequest

    args = [prompt, SamplingParams(), RequestOptions(**options), request_id, "key"]
    metadata: Any = SimpleNamespace(internal_request_id=f"internal {request_id}")
    future: Any = None
    return PendingRequest(args=args, kwargs={}, metadata=metadata, future=future)


async def test_calls_of_the_engine_are_ranked() -> None:
    from draftline.deploy.ray_serve.request_router import PrefixRouter
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

    deployment = DeploymentID(name="engine", app_name="draftline")
    router = PrefixRouter(deployment, DeploymentHandleSource.REPLICA)
    router.initialize_state(block_size=4, max_blocks=100, load_tokens=1, model_name="tiny")
    ids = [ReplicaID(name, deployment) for name in ("one", "two")]
    replicas: list[Any] = [SimpleNamespace(replica_id=replica_id) for replica_id in ids]
    # As after `update_replicas`, without asking the replicas.
    router._replicas = {replica.replica_id: replica for replica in replicas}
    router._routing.keep(replica_id.unique_id for replica_id in ids)

    first = pending(tuple(range(20)), "a")
    router.on_request_routed(first, ids[1], None)
    again = pending(tuple(range(24)), "b")
    assert await router.choose_replicas(replicas, again) == [[replicas[1]], [replicas[0]]]
    assert again.routing_context.should_backoff
    assert router._routed(pending((1,), "d")).tenant == ""
    assert router._routed(pending((1,), "d", namespace="acme")).tenant == "acme"
    # Its own request is known to run there; one without a prompt goes by load alone.
    health = pending((), "c")
    health.args = []
    assert (await router.choose_replicas(replicas, health))[0] == [replicas[0]]
    router.replica_queue_len_cache.update(ids[0], 5)
    assert (await router.choose_replicas(replicas, None))[0] == [replicas[1]]
    router.on_request_completed(ids[1], "internal a")
    # One that was refused never ran.
    router.on_request_completed(ids[1], "internal b")
    assert not router._num_ours
    assert not router._ours


def totals(client: httpx.Client, name: str) -> list[float]:
    text = client.get("/metrics").raise_for_status().text
    return [float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)]


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(900)
def test_prefixes_and_sessions_keep_to_their_replica(checkpoint: Path, ray_serve_url: str) -> None:
    from draftline.deploy.ray_serve.serve_app import build_app
    from ray import serve

    settings = {
        "model": str(checkpoint), "kv_cache_tokens": 2048, "backend": "local", "block_size": 4,
        "deployment": {"num_replicas": 2, "coordinator_cpus": 0.5, "ingress_cpus": 0.5},
    }  # fmt: skip
    serve.run(build_app(settings), name="draftline")
    with httpx.Client(base_url=ray_serve_url, timeout=120) as client:
        for turn in range(4):
            for start in (3, 40):
                body = {"prompt": list(range(start, start + 24 + 4 * turn)), "max_tokens": 2}
                client.post("/v1/completions", json=body).raise_for_status()
        queries = sum(totals(client, "vllm:prefix_cache_queries_total"))
        hits = sum(totals(client, "vllm:prefix_cache_hits_total"))
        # What was sent before is found there: every turn but the first of both.
        (sent,) = totals(client, "draftline:routed_prefix_tokens_total")
        assert 0 < sent == hits
        assert hits / queries > 0.5
        before = totals(client, "draftline:engine_steps_total")
        session = {"x-session-id": "s"}
        for start in range(8):
            body = {"prompt": list(range(start, start + 9)), "max_tokens": 2}
            client.post("/v1/completions", json=body, headers=session).raise_for_status()
        after = totals(client, "draftline:engine_steps_total")
        assert len(before) == len(after) == 2
        assert sum(one > other for one, other in zip(after, before, strict=True)) == 1
        text = client.get("/metrics").text
        (count,) = re.findall(r'routed_requests_total{.*reason="session"} (\S+)', text)
        assert float(count) == 8
