"""The API over two models: which of them answers, and who may ask for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from draftline.cluster.config import EngineConfig
from draftline.deploy.api.app import create_models_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.api.http.metrics import JointMetrics, ServerMetrics
from draftline.deploy.api.routes.models import ServedModel
from draftline.deploy.settings.settings import ServerConfig
from draftline.deploy.settings.tenants import TenantConfig
from prometheus_client.parser import text_string_to_metric_families
from support.fakes.fake_engine import FakeEngine

NAMES = ("large", "org/small")
BODY = {"prompt": "abc", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}


@asynccontextmanager
async def serving(*engines: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(**options)
    counts = [ServerMetrics(name) for name in NAMES]
    sources = [
        ServedModel(
            name=name,
            engine_client=LocalEngineClient(engine),  # pyright: ignore[reportArgumentType]
            config=config,
            metrics=metrics,
            settings=EngineConfig(model="demo", max_num_seqs=3),
        )
        for name, engine, metrics in zip(NAMES, engines, counts, strict=True)
    ]
    app = create_models_app(sources, config, JointMetrics(counts))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


@pytest.fixture
def engines() -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine(), FakeEngine()


def key(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 4}),
    ],
)
async def test_the_named_model_answers(
    engines: tuple[FakeEngine, FakeEngine], path: str, body: dict[str, Any], index: int
) -> None:
    async with serving(*engines) as client:
        answer = await client.post(path, json={**body, "model": NAMES[index]})
        assert (answer.status_code, answer.json()["model"]) == (200, NAMES[index])
        asked = [bool(engine.calls) for engine in engines]
        assert asked == [index == 0, index == 1]


async def test_a_folder_is_named_by_its_last_part_or_its_path(tmp_path: Path) -> None:
    folders = [tmp_path / "small", tmp_path / "large"]
    named = EngineConfig(model=str(folders[1]), served_model_name="own")
    config = ServerConfig(
        api_keys=("operator",),
        tenants=(
            TenantConfig(name="a", key_sha256=(digest("a"),), models=(str(folders[0]),)),
            TenantConfig(name="b", key_sha256=(digest("b"),), models=("small",)),
            TenantConfig(name="c", key_sha256=(digest("c"),), models=("own",)),
        ),
    )
    sources = [
        ServedModel(
            name=settings.name,
            engine_client=LocalEngineClient(FakeEngine()),  # pyright: ignore[reportArgumentType]
            config=config,
            metrics=ServerMetrics(settings.name),
            settings=settings,
        )
        for settings in (EngineConfig(model=str(folders[0])), named)
    ]
    app = create_models_app(sources, config, JointMetrics([one.metrics for one in sources]))  # pyright: ignore[reportArgumentType]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):

        async def status(name: str, caller: str) -> tuple[int, str | None]:
            body = {**BODY, "model": name}
            answer = await client.post("/v1/completions", json=body, headers=key(caller))
            return answer.status_code, answer.json().get("model")

        listed = (await client.get("/v1/models", headers=key("operator"))).json()["data"]
        assert [card["id"] for card in listed] == ["small", "own"]
        for caller in ("operator", "a", "b"):
            for name in ("small", str(folders[0])):
                assert await status(name, caller) == (200, "small")
        assert await status("own", "operator") == (200, "own")
        # A name that was given is the only one.
        assert await status(str(folders[1]), "operator") == (404, None)
        assert await status("large", "operator") == (404, None)
        assert await status(str(folders[0]), "c") == (403, None)
        assert await status("own", "a") == (403, None)


async def test_all_models_are_listed(engines: tuple[FakeEngine, FakeEngine]) -> None:
    async with serving(*engines) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == list(NAMES)
        assert (await client.get("/v1/models/org/small")).json() == cards[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/third"])
async def test_an_unknown_model_is_404_as_openai_says(
    engines: tuple[FakeEngine, FakeEngine], path: str
) -> None:
    async with serving(*engines) as client:
        body = {**BODY, "model": "third"}
        asking = client.post(path, json=body) if "models" not in path else client.get(path)
        answer = await asking
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (
            404,
            "NotFoundError",
            "model",
        )
        assert "'large', 'org/small'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_request_must_name_its_model(
    engines: tuple[FakeEngine, FakeEngine], path: str
) -> None:
    async with serving(*engines) as client:
        answer = await client.post(path, json={"prompt": "abc"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_tenants_see_and_use_their_own_models(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    tenants = [{"name": "acme", "key_sha256": digest("a"), "models": ["org/small"]}]
    async with serving(*engines, api_keys=("operator",), tenants=tenants) as client:
        listed = (await client.get("/v1/models", headers=key("a"))).json()["data"]
        assert [card["id"] for card in listed] == ["org/small"]
        statuses = [
            (await client.post("/v1/completions", json={**BODY, "model": name}, headers=key("a")))
            for name in ("org/small", "large", "third")
        ]
        assert [answer.status_code for answer in statuses] == [200, 403, 404]
        # Of what it may not use, it is not told.
        assert "large" not in statuses[2].json()["error"]["message"]
        everything = await client.get("/v1/models", headers=key("operator"))
        assert len(everything.json()["data"]) == 2


async def test_limits_count_over_all_models(engines: tuple[FakeEngine, FakeEngine]) -> None:
    tenants = [{"name": "acme", "key_sha256": digest("a"), "requests_per_minute": 3}]
    async with serving(*engines, api_keys=("operator",), tenants=tenants) as client:
        statuses = [
            (
                await client.post(
                    "/v1/completions", json={**BODY, "model": NAMES[n % 2]}, headers=key("a")
                )
            ).status_code
            for n in range(5)
        ]
        assert statuses == [200, 200, 200, 429, 429]
        page = (await client.get("/metrics", headers=key("operator"))).text
        families = {family.name: family for family in text_string_to_metric_families(page)}
        [refused] = families["draftline:tenant_refusals"].samples[:1]
        assert (refused.labels["model_name"], refused.labels["tenant"], refused.value) == (
            "", "acme", 2.0,
        )  # fmt: skip


async def test_metrics_of_all_models_are_one_page(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    async with serving(*engines) as client:
        for name, count in zip(NAMES, (1, 2), strict=True):
            for _ in range(count):
                await client.post("/v1/completions", json={**BODY, "model": name})
        page = (await client.get("/metrics")).text
        heads = [line for line in page.splitlines() if line.startswith("# TYPE")]
        assert len(heads) == len(set(heads))
        families = {family.name: family for family in text_string_to_metric_families(page)}
        told = {
            sample.labels["model_name"]: sample.value
            for sample in families["vllm:request_success"].samples
            if sample.name.endswith("_total")
        }
        assert told == {"large": 1.0, "org/small": 2.0}
        running = families["vllm:num_requests_running"].samples
        assert {sample.labels["model_name"] for sample in running} == set(NAMES)


async def test_health_and_what_the_operator_is_told(
    engines: tuple[FakeEngine, FakeEngine],
) -> None:
    async with serving(*engines) as client:
        info = (await client.get("/server_info")).json()
        assert list(info["models"]) == list(NAMES)
        assert info["models"]["large"]["max_num_seqs"] == 3
        assert [engine["model"] for engine in info["engines"]] == list(NAMES)
        assert (await client.get("/load")).status_code == 200
        engines[0].healthy = False
        assert (await client.get("/health")).status_code == 200
        engines[1].healthy = False
        assert (await client.get("/health")).status_code == 503


def digest(text: str) -> str:
    from draftline.deploy.settings.tenants import key_digest

    return key_digest(text)
