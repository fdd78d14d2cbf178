"""Calls of tools and reasoning, found in text: however it is cut into pieces, and without loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import pytest
from draftline.deploy.api.tools.call_parsers import HermesParser, LlamaParser, MistralParser
from draftline.deploy.api.tools.call_syntax import (
    HERMES,
    LLAMA,
    MISTRAL,
    PLAIN_JSON,
    ForcedCallParser,
    tool_family,
)
from draftline.deploy.api.tools.chat_plan import PlainParser, ReasoningParser
from draftline.deploy.api.tools.events import (
    CallArgumentsDelta,
    CallStart,
    Event,
    ParsedAnswer,
    Parser,
    parse_whole,
)
from hypothesis import given
from hypothesis import strategies as st

NAMES = ("get_weather", "f")
SYNTAXES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "json": PLAIN_JSON}


def ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"call-{next(numbers)}"


def new_parser(kind: str, limit: int | None = None) -> Parser:
    family, _, thinks = kind.partition("+")
    parser: Parser
    match family:
        case "hermes":
            parser = HermesParser(NAMES, ids(), limit)
        case "llama3_json":
            parser = LlamaParser(NAMES, ids(), limit)
        case "mistral":
            parser = MistralParser(NAMES, ids(), limit)
        case "plain":
            parser = PlainParser()
        case _:
            parser = ForcedCallParser(SYNTAXES[family.removeprefix("forced-")], ids())
    return ReasoningParser(parser, inside=thinks == "inside") if thinks else parser


KINDS = [
    "hermes", "llama3_json", "mistral", "plain+inside", "plain+outside", "hermes+inside",
    "mistral+outside", "forced-hermes", "forced-llama3_json", "forced-mistral", "forced-json",
    "forced-hermes+inside",
]  # fmt: skip


def whole(kind: str, text: str, limit: int | None = None) -> ParsedAnswer:
    return parse_whole(new_parser(kind, limit), text)


def calls(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


PIECES = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]a1",
    "<think>", "</think>", "{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "a", "<", "</",
    "f", "1", "null", '"name"', '"arguments"', '"parameters"', '"f"', '"get_weather"', '"x"', "é",
    '{"name": "f", "arguments": {"a": "}"}}', '{"name": "f", "parameters": {"a": [1, {}]}}',
    '{"name": "nobody", "arguments": {}}', '{"name": "get_weather"}', "Sure. ", "\n\n",
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, data=st.data())
def test_pieces_of_a_text_say_what_the_whole_says(
    kind: str, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    parser, answer = new_parser(kind), ParsedAnswer()
    for start, stop in pairwise(edges):
        answer.add(parser.push(text[start:stop]))
    answer.add(parser.finish())
    assert answer == whole(kind, text)
    by_letter, letters = new_parser(kind), ParsedAnswer()
    for letter in text:
        letters.add(by_letter.push(letter))
    letters.add(by_letter.finish())
    assert letters == answer


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral"])
@given(text=texts)
def test_a_text_without_calls_is_content_letter_by_letter(kind: str, text: str) -> None:
    answer = whole(kind, text)
    if not answer.calls:
        assert answer.content == text
    for call in answer.calls:
        assert call.name in NAMES
        assert isinstance(json.loads(call.arguments), dict)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=3)


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral"])
@given(made=st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3))
def test_what_a_family_spells_its_parsers_read(
    family: str, made: list[tuple[str, dict[str, Any]]]
) -> None:
    for ascii_only in (True, False):
        text = SYNTAXES[family].spell(
            (name, json.dumps(given, ensure_ascii=ascii_only)) for name, given in made
        )
        for kind in (family, f"forced-{family}"):
            answer = whole(kind, text)
            assert calls(answer) == made, kind
            assert answer.content == ""


@pytest.mark.parametrize(
    ("kind", "text", "content", "expected"),
    [
        ("hermes", 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
         "Sure.", [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>\n',
         "", [("f", {"a": "</tool_call>"})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> Done.',
         " Done.", [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}', "", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f"}</tool', "", [("f", {})]),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
         '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>",
         []),
        ("hermes", '<tool_call>{bad <tool_call>{"name": "f"}</tool_call>', "<tool_call>{bad",
         [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1',
         '<tool_call>{"name": "f", "arguments": {"a": 1', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
         '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "get_weather"}',
         "", [("f", {}), ("get_weather", {})]),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", 'Here: {"name": "f"}', 'Here: {"name": "f"}', []),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("mistral",
         '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "get_weather"}]', "",
         [("f", {"a": "]"}), ("get_weather", {})]),
        ("mistral", 'Ok [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather{}', "Ok",
         [("f", {"a": 1}), ("get_weather", {})]),
        ("mistral", '[TOOL_CALLS]other[ARGS]{"a": 1}', '[TOOL_CALLS]other[ARGS]{"a": 1}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}, oops]', ", oops]", [("f", {})]),
        ("forced-json", '[{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
        ("forced-json", '[{"name": "f', '[{"name": "f', []),
        ("forced-json", '[{"name": "f", "arguments": {}}, {"na', "", [("f", {})]),
    ],
)  # fmt: skip
def test_calls(
    kind: str, text: str, content: str, expected: list[tuple[str, dict[str, Any]]]
) -> None:
    answer = whole(kind, text)
    assert calls(answer) == expected
    assert answer.content == content


def test_arguments_keep_the_models_spelling() -> None:
    answer = whole("hermes", '<tool_call>{"name": "f", "arguments":  {"a":1.10,"b": "\\u00e9"} }')
    assert answer.calls[0].arguments == '{"a":1.10,"b": "\\u00e9"}'


def test_arguments_that_must_come_are_told_as_they_come() -> None:
    parser = new_parser("forced-json")
    events: list[Event] = parser.push('[{"name": "f", "argum')
    assert events == []
    events = parser.push('ents": {"a": ')
    assert events == [CallStart(0, "call-0", "f"), CallArgumentsDelta(0, '{"a": ')]
    assert parser.push('"x') == [CallArgumentsDelta(0, '"x')]
    assert parser.push('"}') == [CallArgumentsDelta(0, '"}')]
    assert parser.push("}]") == []
    assert parser.finish() == []


def test_a_call_that_was_cut_off_has_its_arguments_so_far() -> None:
    answer = whole("forced-hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "lo')
    assert answer.calls[0].arguments == '{"a": "lo'
    assert answer.content == ""


def test_calls_above_the_limit_are_left_out() -> None:
    text = HERMES.spell([("f", "{}"), ("get_weather", "{}")])
    assert calls(whole("hermes", text, limit=1)) == [("f", {})]


@pytest.mark.parametrize(
    ("kind", "text", "reasoning", "content"),
    [
        ("plain+outside", "<think>\nhm, so\n</think>\n\nYes.", "hm, so", "Yes."),
        ("plain+inside", "hm </think>Yes", "hm", "Yes"),
        ("plain+inside", "<think>hm</think>Yes", "hm", "Yes"),
        ("plain+inside", " hm and ", "hm and", ""),
        ("plain+outside", "Yes, <think> is a tag", "", "Yes, <think> is a tag"),
        ("plain+outside", "<think>for ever", "for ever", ""),
        ("plain+outside", " <think", "", " <think"),
        ("plain+outside", "<think></think>\nYes\n", "", "Yes\n"),
    ],
)
def test_reasoning(kind: str, text: str, reasoning: str, content: str) -> None:
    answer = whole(kind, text)
    assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral", "plain+outside"])
@pytest.mark.parametrize(
    "text",
    [
        "\n" * 3000 + "<think>a</think>b",
        "<tool_call>" + " " * 3000 + '{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f"}' + " " * 3000 + "</tool_call>",
        '<tool_call>{"x": "' + '<tool_call>{"name": 3}</tool_call>' * 300 + '"y}',
        "[TOOL_CALLS]" + "a" * 3000 + "{}",
        '{"name": "f", "parameters": {"a": "' + 'x\\"' * 3000 + '"}}',
    ],
    ids=["space first", "space in", "space behind", "tags in a text", "long name", "long text"],
)
def test_long_texts_in_pieces(kind: str, text: str) -> None:
    expected = whole(kind, text)
    for size in (1, 7, 1000, len(text)):
        parser, answer = new_parser(kind), ParsedAnswer()
        for start in range(0, len(text), size):
            answer.add(parser.push(text[start : start + size]))
        answer.add(parser.finish())
        assert answer == expected
    if not (expected.calls or expected.reasoning):
        assert expected.content == text


def test_calls_after_reasoning() -> None:
    text = (
        'I call <tool_call>.</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )
    answer = whole("hermes+inside", text)
    assert answer.reasoning == "I call <tool_call>."
    assert calls(answer) == [("f", {})]
    assert answer.content == ""


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<tool_call>\n<function=name>", "none"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", "none"),
    ],
)
def test_the_chat_template_tells_the_family(template: str, family: str) -> None:
    assert tool_family("auto", template).name == family
    assert tool_family("hermes", template).name == "hermes"
    assert tool_family("none", template).name == "none"


def test_ids_of_calls_are_as_templates_want_them() -> None:
    mistral = tool_family("mistral", "").new_id()
    assert len(mistral) == 9
    assert mistral.isalnum()
    assert tool_family("hermes", "").new_id().startswith("call_")
