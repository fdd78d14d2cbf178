"""Forms that ended the whole server: each ends its own request, with an error that says why."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from draftline import AsyncEngine, DrafterConfig, EngineConfig
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.settings.settings import RequestLimits, ServerConfig

PROMPT = "def add(a, b):\n    return"
ANY_OF_400 = {
    "anyOf": [
        {
            "type": "object",
            "properties": {f"k{i}": {"type": "string"}, f"j{i}": {"type": "integer"}},
            "required": [f"k{i}"],
        }
        for i in range(400)
    ]
}
AMBIGUOUS = 'start: s\ns: "a" | s s | s s s | s s s s | s s s s s'
SECRET = "tenants-own-words"
# Beyond these a form is not looked at.
WIDE_LIMITS = {"max_choices": 100_000, "max_grammar_bytes": 10_000_000, "max_json_values": 10**7}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    engine = AsyncEngine(EngineConfig(model="demo", drafters=[DrafterConfig(kind="prompt_lookup")]))
    app = create_app(LocalEngineClient(engine), ServerConfig(max_body_bytes=10_000_000), "demo")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in WIDE_LIMITS.items():
            patch.setattr(RequestLimits, name, limit)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://a", timeout=120) as found,
        ):
            yield found


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": ANY_OF_400}, "max_tokens": 60, "temperature": 1, "seed": 3},
        {"structured_outputs": {"grammar": AMBIGUOUS}, "min_tokens": 300, "max_tokens": 400},
    ],
    ids=["any_of", "ambiguous"],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_hostile_form_hurts_nobody(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    before = (await complete(client)).json()["choices"][0]["text"]
    answer = await complete(client, **fields)
    assert answer.status_code in (200, 400), answer.text
    assert (await client.get("/health")).status_code == 200
    assert (await complete(client)).json()["choices"][0]["text"] == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_that_fails_in_a_stream_ends_alone_and_is_told_there(
    client: httpx.AsyncClient, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The library takes so many texts, and gives up after the first token."""
    before = (await complete(client)).json()["choices"][0]["text"]
    choice = [f"{SECRET} {i} {i * 7}" for i in range(20_000)]
    answer = await complete(client, structured_outputs={"choice": choice}, stream=True)
    assert answer.status_code == 200
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-2])["error"]
    assert (error["code"], error["param"]) == (400, "structured_outputs")
    assert events[-1] == "[DONE]"
    assert (await client.get("/health")).status_code == 200
    assert (await complete(client)).json()["choices"][0]["text"] == before
    told = capfd.readouterr()
    assert SECRET not in told.out + told.err + caplog.text
