"""Calls that must be made, of the demo model over HTTP: the schema holds, and drafting changes
nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from draftline.models.load.bundled import demo_path
from support.servers.served_model import served_model

pytestmark = [pytest.mark.net, pytest.mark.full]

# In the manner of Hermes.
TEMPLATE = (
    "{% if tools %}# tools: {{ tools | tojson }}, called as <tool_call>{{ '\n' }}{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
LIGHT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"enum": ["kitchen", "hall"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["room", "level"],
        },
    },
}
DOOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "open_door",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "maxLength": 6}},
            "required": ["code"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "set_light"}}
ASK = [{"role": "user", "content": "set the light in the hall to 7"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(demo_path(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    arguments = ["--speculative-config", '[{"kind": "spectra"}]', "--api-processes", "0"]
    with (
        served_model(str(folder), *arguments) as served,
        openai.OpenAI(base_url=served.url, api_key="-", max_retries=0) as client,
    ):
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    model = client.models.list().data[0].id
    speculative = {"enabled": fields.pop("speculative"), "report": False}
    return client.chat.completions.create(
        model=model, extra_body={"speculative": speculative}, **fields
    )


def whole_calls(client: openai.OpenAI, **fields: Any) -> list[tuple[str, str]]:
    choice = create(client, **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


def streamed_calls(client: openai.OpenAI, **fields: Any) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    num_fragments = 0
    for chunk in create(client, stream=True, **fields):
        for part in chunk.choices[0].delta.tool_calls or []:
            if part.id:
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
            num_fragments += bool(part.function.arguments)
        assert not chunk.choices[0].delta.content
    assert num_fragments > len(calls)
    return [(name, arguments) for name, arguments in calls]


def check(name: str, arguments: str) -> None:
    """The arguments follow the tool's schema."""
    values = json.loads(arguments)
    if name == "set_light":
        assert set(values) == {"room", "level"}
        assert values["room"] in ("kitchen", "hall")
        assert isinstance(values["level"], int)
        assert 0 <= values["level"] <= 99
    else:
        assert name == "open_door"
        assert set(values) == {"code"}
        assert len(values["code"]) <= 6


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_must_be_made(
    client: openai.OpenAI, choice: Any, sampling: dict[str, Any]
) -> None:
    fields = {"messages": ASK, "tools": [LIGHT, DOOR], "tool_choice": choice, **sampling}
    fields |= {"max_tokens": 200, "parallel_tool_calls": False}
    made = whole_calls(client, speculative=True, **fields)
    assert len(made) == 1
    check(*made[0])
    if choice is NAMED:
        assert [name for name, _ in made] == ["set_light"]
    assert whole_calls(client, speculative=False, **fields) == made
    assert streamed_calls(client, speculative=True, **fields) == made
    assert streamed_calls(client, speculative=False, **fields) == made


def test_several_calls_that_are_cut_off(client: openai.OpenAI) -> None:
    fields = {"messages": ASK, "tools": [LIGHT, DOOR], "tool_choice": "required", "seed": 5,
              "max_tokens": 100}  # fmt: skip
    made = streamed_calls(client, speculative=True, **fields)
    assert len(made) > 1
    for name, arguments in made[:-1]:
        check(name, arguments)
    assert streamed_calls(client, speculative=False, **fields) == made


def test_the_loop_of_two_turns(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [LIGHT, DOOR], "temperature": 0, "speculative": True}
    first = create(client, messages=ASK, tool_choice=NAMED, **fields).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}
    for own in (first, first.model_dump()):
        second = create(client, messages=[*ASK, own, result], max_tokens=8, **fields).choices[0]
        assert second.message.role == "assistant"


def test_a_form_or_a_call(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    fields = {"messages": ASK, "tools": [LIGHT], "response_format": form, "temperature": 0,
              "max_tokens": 300, "logprobs": True, "parallel_tool_calls": False}  # fmt: skip
    drafted = create(client, speculative=True, **fields).choices[0]
    plain = create(client, speculative=False, **fields).choices[0]
    if drafted.message.tool_calls:
        check("set_light", drafted.message.tool_calls[0].function.arguments)
    else:
        assert set(json.loads(drafted.message.content)) == {"a"}
    tokens = [[one.token for one in choice.logprobs.content] for choice in (drafted, plain)]
    assert tokens[0] == tokens[1]


def test_a_schema_that_is_none_is_a_bad_request(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, messages=ASK, tools=[tool], tool_choice="required", speculative=True)
    assert caught.value.param == "tools"
