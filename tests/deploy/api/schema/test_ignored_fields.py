"""Unknown fields: refused, or left out and named."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from draftline.deploy.api.routes.models import HEADER, name_ignored
from starlette.responses import Response
from support.fakes.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "secret_part": "s3cret"}]}
    ],
    "speculative": {"enabled": False, "later": 1},
    "future_field": "s3cret",
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "x-own": 1}, "newer": True},
    },
}
NAMES = {
    "future_field",
    "messages.0.content.0.secret_part",
    "response_format.json_schema.newer",
    "speculative.later",
}


async def test_unknown_fields_are_refused_by_default(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 400
    assert "unknown field" in response.json()["error"]["message"]
    assert HEADER not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header(
    serving: Any, engine: FakeEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving(engine, ignore_unknown_fields=True) as client:
            response = await client.post(CHAT, json=BODY | {"stream": stream})
    assert response.status_code == 200, response.text
    assert set(response.headers[HEADER].split(", ")) == NAMES
    params, options = engine.calls[0][1:]
    assert not options.speculative
    # What stands in a schema is no field of the request.
    assert params.structured_output is not None
    assert "x-own" in params.structured_output.value
    assert "s3cret" not in caplog.text


async def test_what_is_known_is_still_checked(serving: Any, engine: FakeEngine) -> None:
    async with serving(engine, ignore_unknown_fields=True) as client:
        for wrong in ({"temperature": "hot"}, {"audio": {"voice": "a"}}, {"n": 0}):
            response = await client.post(CHAT, json=BODY | wrong)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(wrong))
        response = await client.post("/v1/completions", json={"prompt": "a", "user": "me"})
        assert HEADER not in response.headers
        response = await client.post("/tokenize", json={"prompt": "a", "new": 1})
        assert response.headers[HEADER] == "new"
        response = await client.post("/detokenize", json={"tokens": [1], "new": 1})
        assert response.headers[HEADER] == "new"


def test_names_of_clients_can_stand_in_a_header() -> None:
    response = name_ignored(Response(), ["a\r\nset-cookie: x", "é", "b" * 500])
    assert response.headers[HEADER] == "a??set-cookie??x, ?, " + "b" * 64
    many = name_ignored(Response(), [f"f{i}" for i in range(100)])
    assert many.headers[HEADER].endswith("f15, ...")
