"""The session that a request is of goes along with it."""

from __future__ import annotations

import httpx
import pytest
from support.fakes.fake_engine import FakeEngine

BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_header_names_the_session(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    for headers, session in (({"x-session-id": "one"}, "one"), ({}, "")):
        answer = await client.post(path, json=BODIES[path], headers=headers)
        assert answer.status_code == 200
        assert engine.calls[-1][2].session == session


async def test_a_session_has_a_short_name(client: httpx.AsyncClient) -> None:
    headers = {"x-session-id": "s" * 600}
    answer = await client.post("/v1/completions", json=BODIES["/v1/completions"], headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-session-id"
