"""`/v1/messages` as the official client sends and reads it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, get_type_hints

import anthropic
import httpx
import httpx2
import pytest
from anthropic.types import Message, message_create_params
from draftline.core.errors import CapacityError, StageLost
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.api.schema.messages import MessagesRequest
from draftline.deploy.api.schema.request_models import IGNORED
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine, roomy
from support.tools.named_events import named_events

MESSAGES = "/v1/messages"
TEXT = "def f(x):\n    return x\n"
HI: dict[str, Any] = {"max_tokens": 60, "messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
# The client's newest version names none of these.
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 7}
HERMES = {"tool_call_parser": "hermes"}


@asynccontextmanager
async def official(
    engine: FakeEngine, *, key: str = "x", **options: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client of the API of `engine`; `options` are those of `ServerConfig`."""
    engine_client = LocalEngineClient(engine)  # pyright: ignore[reportArgumentType]
    app: Any = create_app(engine_client, ServerConfig(**options), "tiny")
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport) as http,
        anthropic.AsyncAnthropic(
            api_key=key, base_url="http://test", http_client=http, max_retries=0
        ) as client,
    ):
        yield client


def test_every_field_of_the_official_client_is_known() -> None:
    known = {*MessagesRequest.model_fields, *MessagesRequest.refused, *IGNORED}
    for types in (
        message_create_params.MessageCreateParamsBase,
        message_create_params.MessageCreateParamsStreaming,
    ):
        assert set(get_type_hints(types)) - known == set()


async def test_a_chat_gets_a_message(engine: FakeEngine) -> None:
    async with official(engine) as client:
        answer = await client.messages.create(
            model="tiny",
            max_tokens=60,
            system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            metadata={"user_id": "u"},
            thinking={"type": "disabled"},
            extra_body=SAMPLING | {"speculative": {"enabled": False}},
        )
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == TEXT
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, "tiny")
    assert answer.id.startswith("msg_")
    assert answer.usage.output_tokens == len(TEXT)
    prompt, params, options = engine.calls[0]
    assert engine.tokenizer.decode([*prompt]) == "<system>be brief\n<user>hi\n<assistant>"
    assert answer.usage.input_tokens == len(prompt)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 7)
    assert params.max_tokens == 60
    assert not options.speculative


async def test_why_an_answer_ends() -> None:
    engine = FakeEngine(stop_reason="END")
    async with official(engine) as client:
        cut = await client.messages.create(**HI | {"model": "tiny", "max_tokens": 4})
        stopped = await client.messages.create(**HI, model="tiny", stop_sequences=["END"])
    assert cut.stop_reason == "max_tokens"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert engine.calls[1][1].stop == ("END",)


async def test_a_conversation_goes_on_and_an_answer_is_continued(engine: FakeEngine) -> None:
    async with official(engine) as client:
        first = await client.messages.create(**HI, model="tiny")
        said: list[Any] = [*HI["messages"], first.to_param(), {"role": "user", "content": "on"}]
        await client.messages.create(model="tiny", max_tokens=20, messages=said)
        said[-1] = {"role": "user", "content": "say A"}
        said.append({"role": "assistant", "content": "A"})
        await client.messages.create(model="tiny", max_tokens=20, messages=said)
    second, third = (engine.tokenizer.decode([*call[0]]) for call in engine.calls[1:])
    assert second == f"<user>hi\n<assistant>{TEXT}\n<user>on\n<assistant>"
    assert third == f"<user>hi\n<assistant>{TEXT}\n<user>say A\n<assistant>A"


async def test_a_stream() -> None:
    async with official(FakeEngine()) as client:
        async with client.messages.stream(**HI, model="tiny") as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
        plain = await client.messages.create(**HI, model="tiny", stream=True)
        names = [event.type async for event in plain]
    assert text == TEXT
    (block,) = final.content
    assert block.type == "text"
    assert block.text == TEXT
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(TEXT)
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_a_tool_is_called_and_its_result_is_sent_back() -> None:
    engine = roomy(f"Let me look.{CALL}")
    asked = HI | {"model": "tiny", "max_tokens": 100, "tools": [TOOL]}
    async with official(engine, **HERMES) as client:
        answer = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        said: list[Any] = [*HI["messages"], answer.to_param()]
        result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "sunny"}  # type: ignore[union-attr]
        said.append({"role": "user", "content": [result, {"type": "text", "text": "well?"}]})
        # The template of the fake refuses messages of tools, and says so.
        with pytest.raises(anthropic.BadRequestError, match="no tools here") as caught:
            await client.messages.create(**asked | {"messages": said})
    for message in (answer, streamed):
        text, call = message.content
        assert text.type == "text"
        assert text.text.strip() == "Let me look."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Rome"})
        assert message.stop_reason == "tool_use"
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


def test_blocks_become_messages() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "is_error": True}
    body = MessagesRequest.build(
        {
            "max_tokens": 5,
            "system": "be brief",
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "m", "signature": "s"},
                        {"type": "text", "text": "b"},
                        use,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        result | {"content": [{"type": "text", "text": "1"}]},
                        {"type": "text", "text": "c"},
                    ],
                },
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "output_config": {"effort": "low"},
        }
    )
    chat = body.chat()
    told = [(one.role, one.text, [call.id for call in one.calls]) for one in chat.messages]
    assert told == [
        ("system", "be brief", []),
        ("user", "a", []),
        ("assistant", "b", ["c1"]),
        ("tool", "1", []),
        ("user", "c", []),
    ]
    assert chat.messages[2].reasoning_content == "m"
    assert chat.messages[2].calls[0].function.arguments == '{"a": 1}'
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.tools is not None
    assert chat.tools[0].function.parameters == TOOL["input_schema"]
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert not chat.continue_final_message


async def test_thoughts_are_a_block() -> None:
    engine = FakeEngine("<think>hm</think>yes")
    asked = HI | {"model": "tiny", "max_tokens": 100}
    async with official(engine, reasoning_parser="qwen3") as client:
        answer = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for message in (answer, streamed):
        thought, text = message.content
        assert thought.type == "thinking"
        assert text.type == "text"
        assert (thought.thinking, text.text) == ("hm", "yes")


async def test_tokens_of_a_prompt_are_counted(engine: FakeEngine) -> None:
    async with official(engine) as client:
        asked: Any = {"model": "tiny", "messages": HI["messages"], "system": "be brief"}
        count = await client.messages.count_tokens(**asked)
        answer = await client.messages.create(**asked, max_tokens=5)
    assert count.input_tokens == answer.usage.input_tokens


async def test_models(engine: FakeEngine) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)
    async with official(engine) as client:
        page = await client.models.list()
        listed = [model async for model in client.models.list(limit=1)]
        (model,) = listed
        one = await client.models.retrieve("tiny")
        with pytest.raises(anthropic.NotFoundError, match="known: 'tiny'") as caught:
            await client.models.retrieve("other")
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "tiny")
    assert page.data == listed
    assert one == model
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert before <= model.created_at <= datetime.now(UTC)
    assert (model.lifecycle, model.max_input_tokens, model.max_tokens) == ("active", 128, 128)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


async def test_models_are_not_told_to_a_wrong_key(engine: FakeEngine) -> None:
    async with official(engine, key="wrong", api_keys=["secret"]) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.models.list()
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"


async def test_other_clients_get_openais_form_of_models(client: httpx.AsyncClient) -> None:
    openais = (await client.get("/v1/models", headers={"x-api-key": "x"})).json()
    assert openais["object"] == "list"
    assert openais["data"][0]["object"] == "model"
    anthropics = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert anthropics.json()["data"][0]["type"] == "model"
    missing = (await client.get("/v1/models/other")).json()
    assert missing["error"]["type"] == "NotFoundError"


async def test_a_form(engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    async with official(engine) as client:
        await client.messages.create(**HI, model="tiny", output_config=form)
    params = engine.calls[0][1]
    assert params.structured_output is not None
    assert json.loads(params.structured_output.value) == schema


async def test_a_key_comes_in_either_header(engine: FakeEngine) -> None:
    keys = {"api_keys": ["secret"]}
    async with official(engine, key="secret", **keys) as client:
        assert (await client.messages.create(**HI, model="tiny")).content
    async with official(engine, key="wrong", **keys) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**HI, model="tiny")
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"


async def test_what_goes_wrong_before_the_first_event() -> None:
    async with official(FakeEngine(error=CapacityError("full"))) as client:
        for stream in (False, True):
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**HI, model="tiny", stream=stream)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**HI, model="other")


async def test_what_goes_wrong_later(serving: Any) -> None:
    engine = FakeEngine(error=StageLost("a stage died"), error_at=2)
    async with serving(engine) as client:
        response = await client.post(MESSAGES, json=HI | {"stream": True})
    last = named_events(response.text)[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    assert "recovering" in last["error"]["message"]


NEUTRAL = {
    "service_tier": "auto", "metadata": {}, "tools": [], "tool_choice": {"type": "auto"},
    "stop_sequences": [], "system": "", "thinking": {"type": "adaptive", "display": None},
    "cache_control": {"type": "ephemeral", "ttl": "1h"}, "container": None, "speed": "standard",
    "output_config": {"effort": "high"}, "mcp_servers": [],
}  # fmt: skip


async def test_what_asks_for_nothing_is_accepted(client: httpx.AsyncClient) -> None:
    response = await client.post(MESSAGES, json=HI | NEUTRAL)
    assert response.status_code == 200, response.text
    Message.model_validate(response.json())
    nothing = dict.fromkeys([*MessagesRequest.model_fields, *MessagesRequest.refused])
    response = await client.post(MESSAGES, json=nothing | HI)
    assert response.status_code == 200, response.text


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        (said([{"type": "text", "text": "x"}, {"type": "image", "source": {}}]),
         "messages.0.content: block 1 has 'image'; this model takes text"),
        (said([{"type": "document", "source": {}}]), "block 0 has 'document'"),
        (said([{"type": "tool_result", "tool_use_id": "c",
                "content": [{"type": "image", "source": {}}]}]), "block 0 has 'image'"),
        (said([{"type": "tool_use", "id": "c", "name": "f", "input": {}}]),
         "does not go with the role user"),
        (said("x", "pirate"), "messages.0.role"),
        ({"messages": []}, "messages: list should have at least 1"),
        ({"max_tokens": "5"}, "max_tokens: input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"max_tokens": 4000}, "max_tokens: "),
        ({"temperature": 1000}, "temperature: "),
        ({"stop": ["x"]}, "stop: not supported: send stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"tools": [{"type": "web_search_20260318", "name": "w"}]}, "this server runs no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name goes with type tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported"),
        ({"max_token": 1}, "max_token: unknown field; did you mean 'max_tokens'?"),
        ({"speculative": {"explain": True}, "stream": True}, "see /v1/chat/completions"),
    ],
)  # fmt: skip
async def test_what_is_refused(serving: Any, changes: dict[str, Any], hint: str) -> None:
    async with serving(FakeEngine(), **HERMES) as client:
        response = await client.post(MESSAGES, json=HI | changes)
    assert response.status_code == 400, response.text
    content = response.json()
    assert (content["type"], content["error"]["type"]) == ("error", "invalid_request_error")
    assert hint in content["error"]["message"]
