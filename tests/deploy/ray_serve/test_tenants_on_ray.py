"""Tenants through Ray's ingresses: two HTTP replicas and two engines that share limits in Redis."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from draftline.deploy.settings.tenants import key_digest
from draftline.deploy.tenants import create_tenant, open_tenant_store
from redis import Redis
from support.servers.redis_server import RedisServer

# Ray Serve's modules warn when they are imported, so they are imported in here.
pytestmark = pytest.mark.filterwarnings("ignore")

BODY = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LIMIT = 5
TENANTS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "flood": {},
    "bound": {"requests_per_minute": LIMIT},
    "single": {"max_concurrency": 1},
    "narrow": {"models": ["elsewhere"], "drafters": ["spectra"]},
}


def settings(checkpoint: Path, redis_url: str) -> dict[str, Any]:
    return {
        "model": str(checkpoint), "served_model_name": "tiny", "kv_cache_tokens": 2048,
        "backend": "local", "drafters": [{"kind": "spectra"}], "node_budget": "full",
        # One place, so that whose turn it is shows; and a token a step, so that turns come soon.
        "max_num_seqs": 1, "multi_step_ms": 0,
        "server": {
            "api_key_sha256": [key_digest("operator")], "tenant_store": redis_url,
            "rate_limit_store": redis_url, "rate_limit_on_failure": "closed",
            "usage_log": redis_url,
        },
        "deployment": {
            "num_replicas": 2, "num_ingress_replicas": 2, "coordinator_cpus": 0.5,
            "ingress_cpus": 0.5,
        },
    }  # fmt: skip


class Asking:
    """Sends requests with tenants' keys, each on a connection of its own."""

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self._url = url
        self._keys = keys

    async def post(
        self, tenant: str, headers: Mapping[str, str] | None = None, **changed: Any
    ) -> httpx.Response:
        named = {"authorization": f"Bearer {self._keys[tenant]}", **(headers or {})}
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            return await client.post("/v1/completions", json=BODY | changed, headers=named)

    async def statuses(self, tenant: str, count: int, **changed: Any) -> Counter[int]:
        """Of requests that are sent at once."""
        asking = (self.post(tenant, **changed) for _ in range(count))
        return Counter(answer.status_code for answer in await asyncio.gather(*asking))

    async def page(self) -> str:
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            return (await client.get("/metrics", headers={"authorization": "Bearer operator"})).text


@pytest.mark.cluster
@pytest.mark.redis
@pytest.mark.full
@pytest.mark.timeout(900)
async def test_tenants_over_two_replicas(
    checkpoint: Path, ray_serve_url: str, tmp_path: Path
) -> None:
    from draftline.deploy.ray_serve.serve_app import build_app
    from ray import serve

    with RedisServer(tmp_path) as redis:
        store = open_tenant_store(redis.url)
        keys = {"nobody": "dl-nobody"}
        for name, given in TENANTS.items():
            key = create_tenant(store, name, given)
            assert key is not None
            keys[name] = key.text
        app = await asyncio.to_thread(build_app, settings(checkpoint, redis.url))
        await asyncio.to_thread(serve.run, app, name="draftline")
        asking = Asking(ray_serve_url, keys)
        await refused_as_they_should_be(asking)
        await limits_are_shared(asking)
        await turns_are_taken(asking)
        await told_by_tenant(asking, Redis.from_url(redis.url))


async def refused_as_they_should_be(asking: Asking) -> None:
    assert await asking.statuses("nobody", 4) == {401: 4}
    answer = await asking.post("narrow")
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "model")
    answer = await asking.post("quiet", headers={"x-tenant-id": "flood"})
    # Without trusted gateways the header means nothing.
    assert answer.status_code == 200


async def limits_are_shared(asking: Asking) -> None:
    """Whichever of the HTTP replicas a request comes to. On a busy machine Redis may be late."""
    found = await asking.statuses("bound", 2 * LIMIT)
    assert set(found) <= {200, 429, 503}
    assert found[200] <= LIMIT
    assert found[200] == LIMIT or found[503]
    answer = await asking.post("bound")
    while answer.status_code in (200, 503):
        await asyncio.sleep(1.0)
        answer = await asking.post("bound")
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "RateLimitError")
    # A window slides over two minutes.
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    found = await asking.statuses("single", 4, max_tokens=200)
    assert set(found) <= {200, 429, 503}
    assert found[200] < 4
    assert found[429] or found[503]
    # The place is free again.
    again = await asking.post("single")
    while again.status_code != 200:
        assert again.status_code in (429, 503)
        await asyncio.sleep(1.0)
        again = await asking.post("single")


async def turns_are_taken(asking: Asking) -> None:
    """One engine has a queue of one tenant's requests; another tenant's does not wait for all."""
    ended: list[str] = []

    async def ask(tenant: str) -> None:
        # Of one session, so that all come to one engine.
        answer = await asking.post(tenant, headers={"x-session-id": "s"}, max_tokens=200)
        assert answer.status_code == 200, answer.text
        ended.append(tenant)

    flood = [asyncio.create_task(ask("flood")) for _ in range(6)]
    await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    await ask("quiet")
    await asyncio.gather(*flood)
    assert "flood" in ended[ended.index("quiet") + 2 :], ended


async def told_by_tenant(asking: Asking, redis: Redis) -> None:
    page = await asking.page()
    found = re.findall(r'tenant_requests_total{engine="(\w+)",.*tenant="(\w+)"} (\S+)', page)
    assert len({engine for engine, _, _ in found}) == 2
    counts: Counter[str] = Counter()
    for _, tenant, value in found:
        counts[tenant] += int(float(value))
    assert set(counts) == {"quiet", "flood", "bound", "single"}
    assert (counts["quiet"], counts["flood"]) == (2, 6)
    assert counts["bound"] <= LIMIT
    verified = re.findall(r'tenant_nodes_verified_total{.*tenant="flood"} (\S+)', page)
    assert sum(map(float, verified)) > 0
    records = [json.loads(fields[b"record"]) for _, fields in redis.xrange("draftline:usage")]
    assert Counter(record["tenant"] for record in records) == counts
    assert {record["model"] for record in records} == {"tiny"}
