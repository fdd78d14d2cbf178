"""`/v1/responses` as the official client sends and reads it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, get_type_hints

import httpx
import openai
import pytest
from draftline.core.errors import CapacityError, StageLost
from draftline.deploy.api.schema.request_models import IGNORED
from draftline.deploy.api.schema.responses import ResponsesRequest
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseIncompleteEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    response_create_params,
)
from support.fakes.fake_engine import FakeEngine, roomy
from support.tools.named_events import named_events

RESPONSES = "/v1/responses"
TEXT = "def f(x):\n    return x\n"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
async def official(client: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    http: Any = client
    async with openai.AsyncOpenAI(
        api_key="x", base_url="http://test/v1", http_client=http, max_retries=0
    ) as official:
        yield official


def test_every_field_of_the_official_client_is_known() -> None:
    known = {*ResponsesRequest.model_fields, *ResponsesRequest.refused, *IGNORED}
    for types in (
        response_create_params.ResponseCreateParamsBase,
        response_create_params.ResponseCreateParamsStreaming,
    ):
        assert set(get_type_hints(types)) - known == set()


async def test_a_text_gets_a_response(official: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    answer = await official.responses.create(
        model="tiny",
        input="hi",
        instructions="be brief",
        max_output_tokens=60,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        extra_body={"seed": 7, "speculative": {"enabled": False}},
    )
    Response.model_validate(answer.model_dump())
    assert answer.output_text == TEXT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.id.startswith("resp_")
    assert (answer.instructions, answer.metadata) == ("be brief", {"a": "b"})
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 60)
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(TEXT)
    prompt, params, options = engine.calls[0]
    assert engine.tokenizer.decode([*prompt]) == "<system>be brief\n<user>hi\n<assistant>"
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, 7)
    assert params.max_tokens == 60
    assert not options.speculative


async def test_a_conversation_goes_on(official: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    first = await official.responses.create(model="tiny", input="hi", max_output_tokens=40)
    items: list[Any] = [{"role": "user", "content": "hi"}]
    items += [item.model_dump() for item in first.output]
    items.append(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "on"}]}
    )
    second = await official.responses.create(model="tiny", input=items, max_output_tokens=20)
    assert second.status == "incomplete"
    prompt = engine.tokenizer.decode([*engine.calls[1][0]])
    assert prompt == f"<user>hi\n<assistant>{TEXT}\n<user>on\n<assistant>"


async def test_an_answer_that_is_cut(official: openai.AsyncOpenAI) -> None:
    answer = await official.responses.create(model="tiny", input="hi", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert isinstance(item, ResponseOutputMessage)
    assert item.status == "incomplete"
    assert answer.output_text == TEXT[:4]


async def test_log_probabilities_and_a_form(
    official: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    answer = await official.responses.create(
        model="tiny",
        input="hi",
        max_output_tokens=4,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
    )
    (item,) = answer.output
    assert isinstance(item, ResponseOutputMessage)
    (part,) = item.content
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs is not None
    assert [one.token for one in part.logprobs] == list(TEXT[:4])
    assert len(part.logprobs[0].top_logprobs) == 2
    params = engine.calls[0][1]
    assert params.structured_output is not None
    assert json.loads(params.structured_output.value) == SCHEMA
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("limit", "last", "kind"),
    [(60, "response.completed", ResponseCompletedEvent),
     (4, "response.incomplete", ResponseIncompleteEvent)],
)  # fmt: skip
async def test_a_stream(
    official: openai.AsyncOpenAI, limit: int, last: str, kind: type[Any]
) -> None:
    stream = await official.responses.create(
        model="tiny", input="hi", max_output_tokens=limit, stream=True,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    found = [event async for event in stream]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    names = [event.type for event in found]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        last,
    ]
    deltas = [event for event in found if event.type == "response.output_text.delta"]
    text = "".join(event.delta for event in deltas)
    assert text == TEXT[:limit]
    assert "".join(one.token for event in deltas for one in event.logprobs) == text
    end: Any = found[-1]
    assert isinstance(end, kind)
    assert end.response.output_text == text
    assert end.response.usage is not None
    assert end.response.usage.output_tokens == len(text)


async def test_the_clients_own_helper_reads_the_stream(official: openai.AsyncOpenAI) -> None:
    async with official.responses.stream(model="tiny", input="hi", max_output_tokens=60) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == TEXT


async def test_events_have_names(client: httpx.AsyncClient) -> None:
    response = await client.post(RESPONSES, json={"input": "hi", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = named_events(response.text)
    ends = [event["response"]["status"] for event in found if "response" in event]
    assert ends == ["in_progress", "in_progress", "completed"]
    assert found[-1]["response"]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


async def test_what_goes_wrong_before_the_first_event(serving: Any) -> None:
    async with serving(FakeEngine(error=CapacityError("full"))) as client:
        for stream in (False, True):
            response = await client.post(RESPONSES, json={"input": "hi", "stream": stream})
            assert response.status_code == 429


async def test_what_goes_wrong_later(serving: Any) -> None:
    engine = FakeEngine(error=StageLost("a stage died"), error_at=2)
    async with serving(engine) as client:
        response = await client.post(RESPONSES, json={"input": "hi", "stream": True})
    last = named_events(response.text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert "recovering" in last["response"]["error"]["message"]


NEUTRAL = {
    "previous_response_id": None, "conversation": None, "store": False, "background": False,
    "truncation": "disabled", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}},
    "include": [], "user": "me", "service_tier": "auto", "metadata": {}, "prompt": None,
    "max_tool_calls": None, "top_logprobs": 0, "instructions": None, "max_output_tokens": None,
    "prompt_cache_options": {"mode": "implicit"}, "moderation": None, "stream_options": None,
}  # fmt: skip


async def test_what_servers_return_is_accepted(client: httpx.AsyncClient) -> None:
    response = await client.post(RESPONSES, json={"input": "hi"} | NEUTRAL)
    assert response.status_code == 200, response.text
    echo = response.json()
    sent_back = {name: echo[name] for name in echo if name in NEUTRAL and name != "top_logprobs"}
    response = await client.post(RESPONSES, json={"input": "hi"} | sent_back)
    assert response.status_code == 200, response.text
    fields = [name for name in ResponsesRequest.model_fields if name != "input"]
    nothing = dict.fromkeys([*fields, *ResponsesRequest.refused])
    response = await client.post(RESPONSES, json={"input": "hi"} | nothing)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("changes", "param", "hint"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not kept"),
        ({"store": True}, "store", "not kept"),
        ({"conversation": "conv_1"}, "conversation", "not kept"),
        ({"background": True}, "background", "not kept"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 4000}, "max_output_tokens", "at most"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"temperature": 1000}, "temperature", "100"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "nothing is kept"),
        ({"input": [{"role": "pirate", "content": "x"}]}, "input.0.role", "user"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "input_text",
        ),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
        ({"include": ["file_search_call.results"]}, "include.0", "logprobs"),
        ({"unknown": 1}, "unknown", "unknown field"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "None"),
    ],
)
async def test_what_is_refused(
    client: httpx.AsyncClient, changes: dict[str, Any], param: str, hint: str
) -> None:
    response = await client.post(RESPONSES, json={"input": "hi"} | changes)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert hint in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"),
     ("GET", "resp_1/input_items")],
)  # fmt: skip
async def test_no_response_is_kept(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, f"{RESPONSES}/{path}")
    assert response.status_code == 404
    assert "keeps no responses" in response.json()["error"]["message"]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HERMES = {"tool_call_parser": "hermes"}


async def test_a_function_is_called(serving: Any) -> None:
    body = {"input": "hi", "tools": [TOOL], "max_output_tokens": 100}
    async with serving(roomy(f"Let me look.{CALL}"), **HERMES) as client:
        answer = Response.model_validate((await client.post(RESPONSES, json=body)).json())
        found = named_events((await client.post(RESPONSES, json=body | {"stream": True})).text)
    message, call = answer.output
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert call.status == "completed"
    assert answer.output_text.strip() == "Let me look."
    names = [event["type"] for event in found if "delta" not in event["type"]]
    part = ["response.content_part.done", "response.output_item.done"]
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", *part,
        "response.output_item.added", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    deltas = [one for one in found if one["type"] == "response.function_call_arguments.delta"]
    assert "".join(one["delta"] for one in deltas) == call.arguments
    assert {one["output_index"] for one in deltas} == {1}
    streamed = Response.model_validate(found[-1]["response"])
    assert streamed.output[1].model_dump(exclude={"id", "call_id"}) == call.model_dump(
        exclude={"id", "call_id"}
    )


async def test_what_a_function_returned_is_sent_back(serving: Any) -> None:
    engine = roomy(CALL)
    body: dict[str, Any] = {"input": "hi", "tools": [TOOL], "max_output_tokens": 90}
    async with serving(engine, **HERMES) as client:
        first = (await client.post(RESPONSES, json=body)).json()
        (call,) = first["output"]
        items = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "summary": [], "id": "rs_1"},
            call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"},
        ]
        body = {"input": items, "tools": first["tools"], "tool_choice": first["tool_choice"]}
        # The template of the fake refuses messages of tools, and says so.
        response = await client.post(RESPONSES, json=body)
    assert response.status_code == 400
    assert "no tools here" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "input"


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "m"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}], "id": "msg_1"},
    ]
    body = ResponsesRequest.build({"input": items, "instructions": "be brief"})
    messages = body.chat().messages
    told = [(one.role, one.text, [call.id for call in one.calls]) for one in messages]
    assert told == [
        ("system", "be brief", []),
        ("user", "a", []),
        ("assistant", "", ["c1", "c2"]),
        ("tool", "1", []),
        ("tool", "2", []),
        ("assistant", "b", []),
    ]
    assert messages[2].reasoning_content == "m"


async def test_thoughts_are_an_item(serving: Any) -> None:
    body = {"input": "hi", "max_output_tokens": 100}
    async with serving(FakeEngine("<think>hm</think>yes"), reasoning_parser="qwen3") as client:
        answer = Response.model_validate((await client.post(RESPONSES, json=body)).json())
        found = named_events((await client.post(RESPONSES, json=body | {"stream": True})).text)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "yes"
    thought = [one["delta"] for one in found if one["type"] == "response.reasoning_text.delta"]
    assert "".join(thought) == "hm"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL | {"parameters": 3}]}, "tools.0.parameters"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ],
)
async def test_tools_that_are_refused(serving: Any, changes: dict[str, Any], param: str) -> None:
    async with serving(FakeEngine(), **HERMES) as client:
        response = await client.post(RESPONSES, json={"input": "hi"} | changes)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
