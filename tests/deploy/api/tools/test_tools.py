"""Tools and reasoning through the official client, over models whose text is written here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from draftline.deploy.api.tools.call_syntax import HERMES
from openai.types.chat import ChatCompletionMessage
from support.fakes.fake_engine import FakeEngine
from tokenizers import AddedToken

Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]

LINES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# A mark of each family's own, and the tools, as its real templates have them.
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + LINES,
    "llama3_json": "{% if tools %}{{ tools | tojson }}<|python_tag|>{% endif %}" + LINES,
    "mistral": "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}" + LINES,
}
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "time"}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "time", "arguments": {}}]',
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
ASK: Any = [{"role": "user", "content": "How is the weather?"}]


@asynccontextmanager
async def official(
    serving: Serving, answer: str, template: str | None = None, **config: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeEngine]]:
    """The official client of a server whose model says `answer`."""
    engine = FakeEngine(answer)
    engine.max_model_len = 8192
    if template is not None:
        engine.tokenizer.chat_template = template
    async with serving(engine, **config) as client:
        yield (
            openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="-", http_client=client, max_retries=0
            ),
            engine,
        )


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a stream's deltas come to, as clients put them together; how it ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    async for chunk in await client.chat.completions.create(model="tiny", stream=True, **fields):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                if part.id is not None:
                    assert part.index == len(message["tool_calls"])
                    assert part.type == "function"
                    message["tool_calls"].append(["", ""])
                assert part.function is not None
                call = message["tool_calls"][part.index]
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
            finish = choice.finish_reason or finish
    return message, finish


def calls(message: ChatCompletionMessage) -> list[list[str]]:
    found = []
    for call in message.tool_calls or []:
        assert call.type == "function"
        assert call.id
        found.append([call.function.name, call.function.arguments])
    return found


def prompt_of(engine: FakeEngine, index: int = -1) -> str:
    return engine.tokenizer.decode(engine.calls[index][0])


@pytest.mark.parametrize("family", TEMPLATES)
async def test_calls_that_a_model_makes_by_itself(serving: Serving, family: str) -> None:
    async with official(serving, ANSWERS[family], TEMPLATES[family]) as (client, engine):
        fields: dict[str, Any] = {"messages": ASK, "tools": [WEATHER, TIME]}
        answer = await client.chat.completions.create(model="tiny", **fields)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert calls(choice.message) == [["weather", '{"city": "Oslo"}'], ["time", "{}"]]
        assert "Weather of a city" in prompt_of(engine)
        message, finish = await streamed(client, **fields)
        assert finish == "tool_calls"
        assert message["tool_calls"] == calls(choice.message)
        assert message["content"] == ""
        one = await client.chat.completions.create(
            model="tiny", parallel_tool_calls=False, **fields
        )
        assert calls(one.choices[0].message) == [["weather", '{"city": "Oslo"}']]


@pytest.mark.parametrize("family", TEMPLATES)
async def test_the_clients_own_loop(serving: Serving, family: str) -> None:
    async with official(serving, ANSWERS[family], TEMPLATES[family]) as (client, engine):
        first = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER, TIME]
        )
        message = first.choices[0].message
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            for call in message.tool_calls or []
        ]
        for own in (message, message.model_dump()):
            turns: Any = [*ASK, own, *results]
            await client.chat.completions.create(
                model="tiny", messages=turns, tools=[WEATHER, TIME]
            )
            assert '!weather{"city": "Oslo"}!time{}\n<tool>rain\n<tool>rain\n' in prompt_of(engine)


SENT = '{"city":  "Oslo", "n": 1.50}'


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("'(' + a + ')'", f"({SENT})"),
        ("a.rstrip('}') + ', ' + '}'", SENT[:-1] + ", }"),
        ("a[1:] + ''", SENT[1:]),
        ("a | tojson", '{"city": "Oslo", "n": 1.5}'),
        ("a.city + (a['n'] | string)", "Oslo1.5"),
        ("a if a is string else a | tojson", '{"city": "Oslo", "n": 1.5}'),
    ],
)
async def test_arguments_are_what_the_template_takes(
    serving: Serving, written: str, expected: str
) -> None:
    """An object, or else the client's own text."""
    template = (
        "{% if tools %}<tool_call>{% endif %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        "!{{ " + written + " }}!{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": SENT}}
    turns: Any = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with official(serving, "Fine.", template) as (client, engine):
        await client.chat.completions.create(model="tiny", messages=turns)
        assert prompt_of(engine) == f"!{expected}!"


async def test_a_plain_second_turn(serving: Serving) -> None:
    async with official(serving, "Fine.") as (client, engine):
        first = await client.chat.completions.create(model="tiny", messages=ASK)
        turns: Any = [*ASK, first.choices[0].message, {"role": "user", "content": "And now?"}]
        await client.chat.completions.create(model="tiny", messages=turns)
        dumped: Any = [
            *ASK,
            first.choices[0].message.model_dump()
            | {"refusal": None, "annotations": [], "audio": None, "function_call": None,
               "tool_calls": None, "reasoning_content": None, "reasoning": None},
            {"role": "user", "content": "And now?"},
        ]  # fmt: skip
        await client.chat.completions.create(model="tiny", messages=dumped)
        assert prompt_of(engine) == prompt_of(engine, -2)
        assert "<assistant>Fine.\n<user>And now?" in prompt_of(engine)


async def test_text_before_a_call_and_what_is_no_call_are_content(serving: Serving) -> None:
    text = 'Let me see. <tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call> Hm.'
    async with official(serving, text, TEMPLATES["hermes"]) as (client, _):
        fields: dict[str, Any] = {"messages": ASK, "tools": [WEATHER]}
        answer = await client.chat.completions.create(model="tiny", **fields)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        message, finish = await streamed(client, **fields)
        assert (message["content"], finish) == (text, "stop")


async def test_a_call_that_is_cut_off_is_content(serving: Serving) -> None:
    async with official(serving, ANSWERS["hermes"], TEMPLATES["hermes"]) as (client, _):
        fields: dict[str, Any] = {"messages": ASK, "tools": [WEATHER], "max_tokens": 30}
        answer = await client.chat.completions.create(model="tiny", **fields)
        assert answer.choices[0].message.content == ANSWERS["hermes"][:30]
        assert answer.choices[0].finish_reason == "length"
        message, finish = await streamed(client, **fields)
        assert (message["content"], finish) == (ANSWERS["hermes"][:30], "length")


async def test_log_probs_and_choices_go_with_calls(serving: Serving) -> None:
    async with official(serving, ANSWERS["hermes"], TEMPLATES["hermes"]) as (client, _):
        fields: dict[str, Any] = {
            "messages": ASK, "tools": [WEATHER, TIME], "logprobs": True, "n": 2,
        }  # fmt: skip
        answer = await client.chat.completions.create(model="tiny", **fields)
        tokens = []
        for choice in answer.choices:
            assert len(calls(choice.message)) == 2
            assert choice.logprobs is not None
            tokens.append([one.token for one in choice.logprobs.content or []])
        assert "".join(tokens[0]) == ANSWERS["hermes"]
        told: list[list[str]] = [[], []]
        stream = await client.chat.completions.create(model="tiny", stream=True, **fields)
        async for chunk in stream:
            for choice in chunk.choices:
                found = (choice.logprobs.content if choice.logprobs else None) or []
                told[choice.index] += [one.token for one in found]
        assert told == tokens


async def test_tools_that_must_not_be_called_are_not_told(serving: Serving) -> None:
    async with official(serving, ANSWERS["hermes"], TEMPLATES["hermes"]) as (client, engine):
        answer = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER], tool_choice="none"
        )
        assert answer.choices[0].message.content == ANSWERS["hermes"]
        assert "Weather of a city" not in prompt_of(engine)


def lark(engine: FakeEngine) -> str:
    form = engine.calls[-1][1].structured_output
    assert form is not None
    assert form.kind == "grammar"
    return form.value


async def test_a_template_without_tools_gets_a_preamble(serving: Serving) -> None:
    made = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    async with official(serving, made, LINES) as (client, engine):
        answer = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER, TIME], tool_choice="required"
        )
        assert calls(answer.choices[0].message) == [["weather", '{"city": "Oslo"}']]
        prompt = prompt_of(engine)
        assert prompt.startswith("<system>You can call these tools")
        assert "Weather of a city" in prompt
        assert '"time' in lark(engine).replace("\\", "")
        turns: Any = [
            {"role": "system", "content": "Be brief."}, *ASK, answer.choices[0].message,
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
        ]  # fmt: skip
        await client.chat.completions.create(
            model="tiny", messages=turns, tools=[WEATHER], tool_choice="required"
        )
        assert prompt_of(engine).startswith("<system>Be brief.\n\nYou can call")
        assert f"<assistant>{made}\n<tool>rain\n" in prompt_of(engine)


async def test_a_named_tool_is_the_only_one_in_the_grammar(serving: Serving) -> None:
    made = HERMES.spell([("time", "{}")])
    async with official(serving, made, TEMPLATES["hermes"]) as (client, engine):
        named: Any = {"type": "function", "function": {"name": "time"}}
        answer = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER, TIME], tool_choice=named
        )
        assert calls(answer.choices[0].message) == [["time", "{}"]]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert "weather" not in lark(engine)
        assert "Weather of a city" in prompt_of(engine)
        allowed: Any = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [named]},
        }
        await client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER, TIME], tool_choice=allowed
        )
        assert "weather" not in lark(engine)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [WEATHER]}, "tool_choice", "--tool-call-parser"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [WEATHER, WEATHER], "tool_choice": "required"}, "tools", "one name"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "'required'"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type", "function"),
        ({"tools": [TIME] * 129}, "tools", "128"),
        (
            {"tools": [{"type": "function", "function": {"name": 'a"b'}}]},
            "tools.0.function.name", "pattern",
        ),
        (
            {"tools": [WEATHER],
             "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice", "'other'",
        ),
        (
            {"tools": [WEATHER],
             "tool_choice": {"type": "function", "function": {"name": "a" * 1000}}},
            "tool_choice.function.name", "at most 128",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required",
             "response_format": {"type": "json_object"}},
            "tool_choice", "form",
        ),
        ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message", "add_generation_prompt",
        ),
        ({"documents": [{}] * 129}, "documents", "128"),
    ],
)  # fmt: skip
async def test_what_is_refused(
    serving: Serving, fields: dict[str, Any], param: str, says: str
) -> None:
    async with serving(FakeEngine()) as client:
        response = await client.post("/v1/chat/completions", json={"messages": ASK, **fields})
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["param"] == param
        assert says in error["message"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user"}, "content is required"),
        ({"role": "user", "content": None}, "content is required"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
        ({"role": "user", "content": [{"type": "file"}]}, "'file'"),
        ({"role": "user", "content": [{"type": "text"}]}, "needs a text"),
        ({"role": "user", "content": 3}, "list of parts"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, "tool_call_id"),
        ({"role": "user", "content": "a", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": "{}"}}]}, "tool_calls"),
        ({"role": "robot", "content": "a"}, "role"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "audio"),
    ],
)  # fmt: skip
async def test_messages_that_are_refused(
    serving: Serving, message: dict[str, Any], says: str
) -> None:
    async with serving(FakeEngine()) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [message]})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"].startswith("messages.0")
        assert says in error["message"]


NAMES = (
    "{% for m in messages %}<{{ m.role }}{% if m.name %}={{ m.name }}{% endif %}>{{ m.content }}\n"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "developer", "content": "a"}], "<system>a\n"),
        ([{"role": "user", "content": "a", "name": "Ada"}], "<user=Ada>a\n"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"},
                                       {"type": "text", "text": "b"}]}], "<user>a\nb\n"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
         "<assistant>no\n"),
        ([{"role": "assistant", "content": None, "refusal": "no"}], "<assistant>no\n"),
        ([{"role": "function", "name": "f", "content": "a"}], "<tool=f>a\n"),
        ([{"role": "assistant", "content": None,
           "function_call": {"name": "f", "arguments": "{}"}}],
         '<assistant>[{"name": "f", "arguments": {}}]\n'),
    ],
)  # fmt: skip
async def test_messages_as_templates_get_them(
    serving: Serving, messages: list[dict[str, Any]], prompt: str
) -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = NAMES
    async with serving(engine) as client:
        response = await client.post("/tokenize", json={"messages": messages})
        assert response.status_code == 200, response.text
        assert engine.tokenizer.decode(response.json()["tokens"]) == prompt


async def test_a_developer_where_the_template_knows_one(serving: Serving) -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = "{# system, developer #}" + NAMES
    async with serving(engine) as client:
        messages = [{"role": "developer", "content": "a"}]
        response = await client.post("/tokenize", json={"messages": messages})
        assert engine.tokenizer.decode(response.json()["tokens"]) == "<developer>a\n"


async def test_variables_documents_and_open_messages(serving: Serving) -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = (
        "{{ mood }}{{ documents | tojson if documents else '' }}" + LINES
    )
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I say"}]
    async with serving(engine) as client:

        async def prompt(**fields: Any) -> str:
            response = await client.post("/tokenize", json={"messages": said, **fields})
            assert response.status_code == 200, response.text
            return engine.tokenizer.decode(response.json()["tokens"])

        assert await prompt() == "<user>a\n<assistant>I say\n<assistant>"
        assert await prompt(add_generation_prompt=False) == "<user>a\n<assistant>I say\n"
        assert await prompt(continue_final_message=True) == "<user>a\n<assistant>I say"
        assert (await prompt(chat_template_kwargs={"mood": "!"})).startswith("!<user>")
        assert (await prompt(documents=[{"text": "b"}])).startswith('[{"text": "b"}]<user>')
        assert (await prompt(tools=[WEATHER])).startswith("<system>You can call")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}", "{{ messages[7].content.x }}", "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}", "{% for x in range(99999999) %}{% endfor %}", "{% if %}",
        "{{ messages.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
    ],
)  # fmt: skip
async def test_a_template_that_fails_is_a_bad_request(serving: Serving, template: str) -> None:
    async with serving(FakeEngine(), trust_request_chat_template=True) as client:
        fields = {"messages": ASK, "chat_template": template}
        response = await client.post("/v1/chat/completions", json=fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "messages"


async def test_a_template_of_a_request(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine, trust_request_chat_template=True) as client:
        fields = {"messages": ASK, "chat_template": "Q {{ messages[0].content }}"}
        response = await client.post("/v1/chat/completions", json=fields)
        assert response.status_code == 200
        assert prompt_of(engine) == "Q How is the weather?"


async def test_a_template_that_runs_for_ever_is_ended(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline.deploy.api.engine_client.TEMPLATE_TIMEOUT_S", 0.2)
    loop = "{% for a in range(99999) %}"
    async with serving(FakeEngine(), trust_request_chat_template=True) as client:
        endless = loop * 3 + "{% endfor %}" * 3
        fields = {"messages": ASK, "chat_template": endless}
        response = await client.post("/v1/chat/completions", json=fields)
        assert response.status_code == 400
        assert "longer than 0.2 s" in response.json()["error"]["message"]


THINKING = LINES + "{% if add_generation_prompt and think %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("parser", "text", "variables", "reasoning", "content"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nYes.", {}, "hm", "Yes."),
        ("qwen3", "hm\n</think>\n\nYes.", {"think": True}, "hm", "Yes."),
        ("qwen3", "Yes.", {}, None, "Yes."),
        ("deepseek_r1", "hm</think>Yes.", {}, "hm", "Yes."),
        ("deepseek_r1", "hm, still", {}, "hm, still", None),
        ("none", "<think>hm</think>Yes.", {}, None, "<think>hm</think>Yes."),
    ],
)
async def test_reasoning_stands_apart(
    serving: Serving,
    parser: str,
    text: str,
    variables: dict[str, Any],
    reasoning: str | None,
    content: str | None,
) -> None:
    async with official(serving, text, THINKING, reasoning_parser=parser) as (client, _):
        fields: dict[str, Any] = {
            "messages": ASK, "extra_body": {"chat_template_kwargs": variables},
        }  # fmt: skip
        answer = await client.chat.completions.create(model="tiny", **fields)
        message = answer.choices[0].message
        assert message.content == content
        assert getattr(message, "reasoning_content", None) == reasoning
        assert getattr(message, "reasoning", None) == reasoning
        told, _ = await streamed(client, **fields)
        assert told["content"] == (content or "")
        assert told["reasoning_content"] == (reasoning or "")
        turns: Any = [*ASK, message, {"role": "user", "content": "And?"}]
        await client.chat.completions.create(model="tiny", messages=turns)
        fields["extra_body"]["include_reasoning"] = False
        quiet = await client.chat.completions.create(model="tiny", **fields)
        assert not hasattr(quiet.choices[0].message, "reasoning_content")
        assert quiet.choices[0].message.content == content
        told, _ = await streamed(client, **fields)
        assert (told["content"], told["reasoning_content"]) == (content or "", "")


async def test_calls_after_reasoning(serving: Serving) -> None:
    text = "I need <tool_call>.</think>\n\n" + ANSWERS["hermes"]
    config = {"reasoning_parser": "deepseek_r1"}
    async with official(serving, text, TEMPLATES["hermes"], **config) as (client, engine):
        fields: dict[str, Any] = {"messages": ASK, "tools": [WEATHER, TIME]}
        answer = await client.chat.completions.create(model="tiny", **fields)
        message = answer.choices[0].message
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "I need <tool_call>."
        assert len(calls(message)) == 2
        told, finish = await streamed(client, **fields)
        assert told["tool_calls"] == calls(message)
        assert told["reasoning_content"] == "I need <tool_call>."
        assert finish == "tool_calls"
        form: Any = {"type": "json_object"}
        await client.chat.completions.create(model="tiny", messages=ASK, response_format=form)
        assert "thinking" in lark(engine)


async def test_tags_that_are_special_tokens_have_text(serving: Serving) -> None:
    template = "{# [TOOL_CALLS] #}{% if tools %}{% endif %}" + LINES
    async with official(serving, ANSWERS["mistral"], template) as (client, engine):
        engine.tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
        fields: dict[str, Any] = {"messages": ASK, "tools": [WEATHER, TIME]}
        await client.chat.completions.create(model="tiny", **fields)
        assert not engine.calls[-1][1].skip_special_tokens
        await client.chat.completions.create(model="tiny", messages=ASK)
        assert engine.calls[-1][1].skip_special_tokens
        await client.chat.completions.create(model="tiny", tool_choice="required", **fields)
        assert "<[256]>" in lark(engine)


async def test_the_parser_that_the_server_names(serving: Serving) -> None:
    """Where the template does not tell the family; it is told of the tools by a preamble."""
    config = {"tool_call_parser": "hermes"}
    async with official(serving, ANSWERS["hermes"], LINES, **config) as (client, engine):
        fields: dict[str, Any] = {"messages": ASK, "tools": [WEATHER, TIME]}
        answer = await client.chat.completions.create(model="tiny", **fields)
        assert len(calls(answer.choices[0].message)) == 2
        assert '<tool_call>\n{"name": "NAME", "arguments": ' in prompt_of(engine)
