"""Routes for operators: health, models, metrics, tokens, API keys, request ids."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from draftline import __version__
from prometheus_client.parser import text_string_to_metric_families
from support.fakes.fake_engine import FakeEngine


async def test_health_follows_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in ("/health", "/ping", "/readyz", "/livez"):
        assert (await client.get(path)).status_code == 200
    engine.healthy = False
    # Whoever restarts what does not live must not restart what recovers.
    assert (await client.get("/livez")).status_code == 200
    for path in ("/health", "/ping", "/readyz"):
        response = await client.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    ("method", "path"),
    [("HEAD", "/health"), ("HEAD", "/readyz"), ("HEAD", "/ping"), ("POST", "/ping")],
)
async def test_probes_may_ask_in_other_ways(
    serving: Any, engine: FakeEngine, method: str, path: str
) -> None:
    async with serving(engine, api_keys=("key",)) as client:
        assert (await client.request(method, path)).status_code == 200
        engine.healthy = False
        answer = await client.request(method, path)
        assert answer.status_code == 503
    assert "head" not in (await openapi_paths(serving, engine))["/health"]


async def openapi_paths(serving: Any, engine: FakeEngine) -> dict[str, Any]:
    async with serving(engine) as client:
        return (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(("has_page", "page"), [(True, {"ui": "/ui"}), (False, {})])
async def test_the_root_names_the_api_and_the_page_without_a_key(
    serving: Any, engine: FakeEngine, has_page: bool, page: dict[str, str]
) -> None:
    async with serving(engine, api_keys=("key",), live_page=has_page) as client:
        answer = await client.get("/")
        assert answer.json() == {"server": "draftline", "api": "/v1", **page}
        assert (await client.head("/")).status_code == 200
        if has_page:
            assert (await client.get(page["ui"])).status_code == 200


async def test_models(client: httpx.AsyncClient) -> None:
    cards = (await client.get("/v1/models")).json()
    assert cards["object"] == "list"
    card = cards["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
    assert (await client.get("/v1/models/tiny")).json() == card


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_tokens_there_and_back(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a ü", "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 4
    assert answer["max_model_len"] == 128
    text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert text == {"prompt": "a ü"}


async def test_tokens_of_a_chat(client: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    opened = (await client.post("/tokenize", json=chat)).json()
    shut = (await client.post("/tokenize", json=chat | {"add_generation_prompt": False})).json()
    assert opened["count"] == shut["count"] + len("<assistant>")


async def test_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 6})
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 100})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(set(sample.labels.values()) - {"tiny"})): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["vllm:prompt_tokens_total",] == 6
    assert samples["vllm:generation_tokens_total",] == 6 + 23
    assert samples["vllm:request_success_total", "length"] == 1
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["vllm:num_requests_running", "0"] == 0
    assert samples["vllm:kv_cache_usage_perc", "0"] == 0.25
    assert samples["vllm:time_to_first_token_seconds_sum",] == pytest.approx(1.0)
    assert samples["vllm:e2e_request_latency_seconds_sum",] == pytest.approx(4.0)
    drafts = samples["vllm:spec_decode_num_drafts_total",]
    assert drafts == 2 + 11
    assert samples["vllm:spec_decode_num_draft_tokens_total",] == 3 * drafts
    assert samples["draftline:spec_decode_num_draft_tokens_total", "spectra"] == 3 * drafts
    accepted = samples["vllm:spec_decode_num_accepted_tokens_total",]
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == accepted
    assert samples["draftline:spec_decode_num_accepted_tokens_total", "spectra"] == accepted


async def test_api_key(serving: Any, engine: FakeEngine) -> None:
    async with serving(engine, api_keys=("first", "second")) as client:
        for path in ("/health", "/ping", "/readyz", "/livez"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/nothing", "/docs"):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
                response = await client.get(path, headers=header)
                assert response.status_code == 401, path
                assert response.json()["error"]["type"] == "AuthenticationError"
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            header = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=header)).status_code == 200


ASKS = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_pages_of_named_sites_may_call(serving: Any, engine: FakeEngine) -> None:
    options = {"api_keys": ("key",), "cors_allow_origins": ("https://a.example",)}
    async with serving(engine, **options) as client:
        asked = await client.options("/v1/completions", headers=ASKS)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in asked.headers["access-control-allow-headers"]
        other = await client.options(
            "/v1/completions", headers=ASKS | {"Origin": "https://b.example"}
        )
        assert other.status_code == 400
        # A page must be able to read why it was refused.
        refused = await client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


# What the official client of JavaScript sends (openai 6.49.0, with an organization and a project),
# as browsers spell it: lower case, sorted, without what they may always send.
CLIENT_HEADERS = (
    "authorization,content-type,openai-beta,openai-organization,openai-project,user-agent,"
    "x-stainless-arch,x-stainless-helper-method,x-stainless-lang,x-stainless-os,"
    "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
    "x-stainless-runtime-version,x-stainless-timeout"
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/models"])
async def test_the_official_client_may_call_from_a_page(
    serving: Any, engine: FakeEngine, path: str
) -> None:
    asks = ASKS | {"Access-Control-Request-Headers": CLIENT_HEADERS}
    options = {"api_keys": ("key",), "cors_allow_origins": ("https://a.example",)}
    async with serving(engine, **options) as client:
        answer = await client.options(path, headers=asks)
    assert answer.status_code == 200, answer.text
    allowed = answer.headers["access-control-allow-headers"].split(",")
    assert {*CLIENT_HEADERS.split(",")} <= {name.strip().lower() for name in allowed}
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("x-tenant-id", 400),
        ("authorization, X-Tenant-Id", 400),
        ("X-Stainless-New", 200),
        ("accept", 200),
        ("content-type-2", 400),
    ],
)
async def test_headers_that_pages_may_send(
    serving: Any, engine: FakeEngine, asked: str, status: int
) -> None:
    async with serving(engine, cors_allow_origins=("*",)) as client:
        answer = await client.options(
            "/v1/completions", headers=ASKS | {"Access-Control-Request-Headers": asked}
        )
    assert answer.status_code == status
    told = answer.headers.get("access-control-allow-headers")
    assert told == (asked if status == 200 else None)


async def test_no_site_may_call_by_default(serving: Any, engine: FakeEngine) -> None:
    async with serving(engine) as client:
        assert (await client.options("/v1/completions", headers=ASKS)).status_code == 405
        answer = await client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers


async def test_request_id(client: httpx.AsyncClient) -> None:
    given = await client.get("/version", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = await client.get("/version")
    assert len(made.headers["x-request-id"]) == 32
    for unusable in ("x" * 129, "tab\there"):
        response = await client.get("/v1/nothing", headers={"x-request-id": unusable})
        assert len(response.headers["x-request-id"]) == 32
