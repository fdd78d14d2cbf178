"""What a tenant may send and use, and what it is told where it may not."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest
from draftline.deploy.api.http.gate import WINDOW_S, Window, duration
from draftline.deploy.settings.tenants import key_digest
from support.fakes.fake_engine import FakeEngine

AUTH = {"Authorization": "Bearer k"}
SEVEN = {"prompt": "abcdefg"}
BODY = {"prompt": "abcd", "max_tokens": 2}


def tenant(**settings: Any) -> list[dict[str, Any]]:
    return [
        {"name": "acme", "key_sha256": key_digest("k"), **settings},
        {"name": "free", "key_sha256": key_digest("f")},
    ]


async def post(client: httpx.AsyncClient, body: Any = BODY, **headers: str) -> httpx.Response:
    return await client.post("/v1/completions", json=body, headers=headers or AUTH)


async def test_requests_a_minute(serving: Any, engine: FakeEngine) -> None:
    async with serving(engine, api_keys=["op"], tenants=tenant(requests_per_minute=3)) as client:
        for left in (2, 1, 0):
            answer = await post(client)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        refused = await post(client)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(refused.headers["retry-after"]) <= 2 * WINDOW_S
        error = refused.json()["error"]
        assert error["type"] == "RateLimitError"
        assert "3 requests a minute (requests_per_minute)" in error["message"]
        assert (await post(client, Authorization="Bearer f")).status_code == 200
        assert (await client.get("/v1/models", headers=AUTH)).status_code == 200
        page = await client.get("/metrics", headers={"Authorization": "Bearer op"})
        assert 'tenant_refusals_total{model_name="tiny",reason="requests",tenant="acme"} 1' in (
            page.text
        )
    assert len(engine.calls) == 4


async def test_tokens_a_minute_count_prompts_at_once_and_answers_as_they_come(
    serving: Any, engine: FakeEngine
) -> None:
    async with serving(engine, tenants=tenant(tokens_per_minute=20)) as client:
        answer = await post(client, {"prompt": "abcd", "max_tokens": 10, "stream": True})
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-tokens"] == "16"
        async with asyncio.timeout(20):
            # The answer's tokens are counted within a second or so.
            while (refused := await post(client, SEVEN)).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert refused.status_code == 429
        assert "20 tokens a minute (tokens_per_minute)" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        never = await post(client, {"prompt": "a" * 21})
        assert never.status_code == 429
        assert "retry-after" not in never.headers
        assert "send a shorter one" in never.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "a" * 30}]}
        assert (
            await client.post("/v1/chat/completions", json=chat, headers=AUTH)
        ).status_code == 429


async def test_requests_at_once(serving: Any) -> None:
    hold = asyncio.Event()
    engine = FakeEngine(hold=hold)
    async with serving(engine, tenants=tenant(max_concurrency=2)) as client:
        running = [asyncio.create_task(post(client, {"prompt": "abc"})) for _ in range(2)]
        for _ in range(2):
            await engine.arrivals.get()
        refused = await post(client)
        assert refused.status_code == 429
        assert "2 requests at once (max_concurrency)" in refused.json()["error"]["message"]
        hold.set()
        assert [(await one).status_code for one in running] == [200, 200]
        async with asyncio.timeout(20):
            while (await post(client)).status_code == 429:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)


async def test_models_drafters_and_context(serving: Any, engine: FakeEngine) -> None:
    limits = {"drafters": ["suffix", "spectra"], "max_context": 10, "weight": 2.5}
    async with serving(engine, tenants=tenant(**limits)) as client:
        assert (await post(client, {"prompt": "abcd", "max_tokens": 6})).status_code == 200
        options = engine.calls[-1][2]
        assert options.drafters == ("suffix", "spectra")
        assert (options.tenant, options.weight) == ("acme", 2.5)
        one = {"prompt": "abcd", "max_tokens": 2, "speculative": {"drafters": ["suffix"]}}
        assert (await post(client, one)).status_code == 200
        assert engine.calls[-1][2].drafters == ("suffix",)
        other = await post(client, {"prompt": "a", "speculative": {"drafters": ["model"]}})
        assert other.status_code == 403
        assert other.json()["error"]["param"] == "speculative.drafters"
        assert "allowed: suffix, spectra" in other.json()["error"]["message"]
        long = await post(client, {"prompt": "abcd", "max_tokens": 7})
        assert long.status_code == 400
        assert "10 that this key allows (max_context)" in long.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answer = await client.post("/v1/chat/completions", json=chat, headers=AUTH)
        assert answer.status_code == 400
        card = (await client.get("/v1/models", headers=AUTH)).json()["data"][0]
        assert card["max_model_len"] == 10
    async with serving(engine, tenants=tenant(models=["other"])) as client:
        refused = await post(client, BODY | {"model": "tiny"})
        assert refused.status_code == 403
        assert refused.json()["error"]["param"] == "model"
        assert (await client.get("/v1/models", headers=AUTH)).json()["data"] == []
        assert (await client.get("/v1/models/tiny", headers=AUTH)).status_code == 403
    async with serving(engine, tenants=tenant(drafters=[])) as client:
        assert (await post(client)).status_code == 200
        assert not engine.calls[-1][2].speculative


async def test_an_answer_without_a_limit_keeps_to_the_tenants_context(
    serving: Any, engine: FakeEngine
) -> None:
    async with serving(engine, tenants=tenant(max_context=40)) as client:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answer = await client.post("/v1/chat/completions", json=chat, headers=AUTH)
        assert answer.status_code == 200
        prompt, params, _ = engine.calls[-1]
        assert params.max_tokens == 40 - len(prompt)


@pytest.mark.parametrize(
    ("peer", "header", "status", "said"),
    [
        ("10.1.2.3", {"x-tenant-id": "acme"}, 200, ""),
        ("::ffff:10.1.2.3", {"x-tenant-id": "acme"}, 200, ""),
        ("10.1.2.3", {"x-tenant-id": "acme", "Authorization": "Bearer f"}, 200, ""),
        ("10.1.2.3", {"x-tenant-id": "carl"}, 403, "is no tenant here"),
        ("10.1.2.3", {}, 401, "API key"),
        ("11.1.2.3", {"x-tenant-id": "acme"}, 403, "server.trusted_proxies"),
        ("11.1.2.3", {"x-tenant-id": "acme", "Authorization": "Bearer f"}, 403, "leave it out"),
        ("11.1.2.3", {"Authorization": "Bearer f"}, 200, ""),
        ("name", {"x-tenant-id": "acme"}, 403, "server.trusted_proxies"),
    ],
)
async def test_a_gateway_names_the_tenant(
    serving: Any, engine: FakeEngine, peer: str, header: dict[str, str], status: int, said: str
) -> None:
    tenants = [{"name": "acme"}, tenant()[1]]
    async with serving(engine, tenants=tenants, trusted_proxies=["10.0.0.0/8"]) as client:
        client._transport.client = (peer, 4711)
        answer = await client.post("/v1/completions", json=BODY, headers=header)
        assert answer.status_code == status, answer.text
        assert said in answer.text
        # An address that a proxy took from a header has no port.
        client._transport.client = (peer, 0)
        if "x-tenant-id" in header:
            again = await client.post("/v1/completions", json=BODY, headers=header)
            assert again.status_code == 403
    if status == 200:
        assert engine.calls[0][2].tenant == ("acme" if "x-tenant-id" in header else "free")


async def test_a_name_that_is_there_twice_is_nobodys(serving: Any, engine: FakeEngine) -> None:
    async with serving(
        engine, tenants=[{"name": "acme"}], trusted_proxies=["127.0.0.0/8"]
    ) as client:
        headers = [("x-tenant-id", "acme"), ("x-tenant-id", "acme")]
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("window", "limit", "cost", "wait"),
    [
        (Window(0, 0, 0, 0), 10, 10, 0),
        (Window(0, 0, 0, 0), 10, 11, math.inf),
        (Window(0, 0, 10, 90), 10, 1, 30 + 6),
        (Window(10, 60, 0, 0), 10, 1, 6),
        (Window(10, 30, 5, 90), 10, 5, 30),
        (Window(10, 30, 4, 90), 10, 2, 30 - 24),
    ],
)
def test_how_long_to_wait(window: Window, limit: int, cost: int, wait: float) -> None:
    assert window.wait_s(limit, cost) == pytest.approx(wait)


def test_times_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0, 0.0123, 1, 7.66, 60, 93.5)] == [
        "0ms", "13ms", "1s", "7.66s", "1m0s", "1m33.5s",
    ]  # fmt: skip
