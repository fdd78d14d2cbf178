"""Which chats go along with a prompt, for drafters that read them by a template of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from draftline import EngineConfig
from draftline.cluster.config import DrafterConfig
from draftline.cluster.drafting.drafter_options import may_read_chat
from draftline.core.chat_turns import MAX_CHAT_CHARS, ChatTurn
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OTHER = {"kind": "model", "model": "demo-drafter-other-vocab"}
MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": "h"}]
TURNS = (ChatTurn("system", "be"), ChatTurn("user", "h"))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@asynccontextmanager
async def serve(engine: FakeEngine, drafter: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    client = LocalEngineClient(engine)  # pyright: ignore[reportArgumentType]
    settings = EngineConfig(model="demo", drafters=[drafter])
    engine.max_model_len = 2 * MAX_CHAT_CHARS
    config = ServerConfig(trust_request_chat_template=True)
    app = create_app(client, config, "tiny", engine=settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        yield http


async def sent(body: dict[str, Any], **drafter: Any) -> tuple[ChatTurn, ...]:
    """The chat that the engine gets with a request."""
    engine = FakeEngine()
    async with serve(engine, {**OTHER, **drafter}) as client:
        answer = await client.post(CHAT, json={"max_tokens": 4, **body})
        assert answer.status_code == 200, answer.text
    [(_, _, options)] = engine.calls
    return options.chat


async def test_a_chat_of_texts_goes_along() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert await sent({"messages": MESSAGES}) == TURNS
    told = {"messages": [*MESSAGES, {"role": "assistant", "content": "a"},
                         {"role": "user", "content": parts}]}  # fmt: skip
    assert await sent(told) == (*TURNS, ChatTurn("assistant", "a"), ChatTurn("user", "h\ni"))
    form = {"response_format": {"type": "text"}, "n": 1, "temperature": 0.5}
    assert await sent({"messages": MESSAGES, **form}) == TURNS


async def test_the_turns_of_a_response_go_along() -> None:
    body = {"input": "h", "instructions": "be", "max_output_tokens": 4}
    engine = FakeEngine()
    async with serve(engine, OTHER) as client:
        answer = await client.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
    [(_, _, options)] = engine.calls
    assert options.chat == TURNS


@pytest.mark.parametrize(
    "more",
    [
        {"add_generation_prompt": False},
        {"continue_final_message": True,
         "messages": [*MESSAGES, {"role": "assistant", "content": "so"}]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"documents": [{"text": "a"}]},
        {"chat_template": "{{ messages[0].content }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": "h", "name": "ann"}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "a", "reasoning": "b"},
                      {"role": "user", "content": "c"}]},
        {"messages": [{"role": "user", "content": "a" * (MAX_CHAT_CHARS + 1)}]},
        {"speculative": {"enabled": False}},
        # Its begin is cut off: the chat says more than the prompt.
        {"truncate_prompt_tokens": 5},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
async def test_what_is_more_than_a_chat_of_texts_is_read_as_text(more: dict[str, Any]) -> None:
    assert await sent({"messages": MESSAGES, **more}) == ()


@pytest.mark.parametrize(
    "drafter",
    [{"model": "demo-drafter"}, {"chat_template": "target"}, {"kind": "suffix", "model": None}],
    ids=["same tokenizer", "told so", "no model"],
)
async def test_nothing_goes_along_where_no_drafter_can_ask_for_it(drafter: dict[str, Any]) -> None:
    assert await sent({"messages": MESSAGES}, **drafter) == ()


def test_who_may_ask_for_a_chat() -> None:
    asking = [
        OTHER,
        # Its server knows its options, or this machine has no such folder.
        {"kind": "model", "transport": "grpc", "address": "there:1"},
        {"kind": "model", "model": "/nowhere"},
        {"kind": "model", "transport": "grpc", "drafter_pool": "there"},
    ]
    silent = [
        {"kind": "prompt_lookup"},
        {"kind": "suffix", "transport": "grpc", "address": "there:1"},
        {"kind": "model", "model": "demo-drafter"},
        {**OTHER, "chat_template": "target"},
    ]
    assert all(may_read_chat(DrafterConfig(**one), "demo") for one in asking)
    assert not any(may_read_chat(DrafterConfig(**one), "demo") for one in silent)
