"""Grammars of answers that must call tools: what they allow, with and without reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from draftline.core.errors import RequestError
from draftline.core.request.allowed_tokens import StructuredOutput
from draftline.deploy.api.schema.chat import Tool, ToolFields
from draftline.deploy.api.tools.call_syntax import ToolFamily, tool_family
from draftline.deploy.api.tools.chat_plan import AnswerReading, call_limit, choose_tools
from draftline.deploy.api.tools.events import parse_whole
from draftline.models.load.bundled import demo_path
from draftline.models.text.grammar import GrammarFactory
from draftline.models.text.tokenizer import load_tokenizer
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
    for name, schema in (
        ("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        ("g", None),
    )
]
SCHEMA = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"],
          "additionalProperties": False}  # fmt: skip
ONE = '{"name": "f", "arguments": {"a": 3}}'
TWO = '{"name": "g", "arguments": {}}'


def tokenizer(*special: str) -> PreTrainedTokenizerFast:
    made = load_tokenizer(demo_path())
    assert isinstance(made, PreTrainedTokenizerFast)
    made.add_tokens([AddedToken(text, special=True) for text in special])
    return made


PLAIN = tokenizer()


def reading(
    family: ToolFamily,
    *,
    reasoning: Any = "none",
    form: StructuredOutput | None = None,
    special_ids: dict[str, int] | None = None,
    prompt: str = "",
    **fields: Any,
) -> AnswerReading:
    asked = ToolFields(tools=TOOLS, **({"tool_choice": "required"} | fields))
    chosen = choose_tools(asked)
    return AnswerReading(
        chosen=chosen, family=family, reasoning=reasoning, form=form,
        max_calls=call_limit(asked, chosen), special_ids=special_ids or {}, prompt=prompt,
    )  # fmt: skip


def allows(one: AnswerReading, text: str, model: PreTrainedTokenizerFast = PLAIN) -> bool:
    """Whether the answer may be this text and end there."""
    output = one.structured_output()
    assert output is not None
    assert output.kind == "grammar"
    grammar = LLMatcher.grammar_from_lark(output.value)
    end = [model.eos_token_id]
    prepared = LLTokenizer(model.backend_tokenizer.to_str(), n_vocab=len(model), eos_token=end)
    assert not LLMatcher.validate_grammar(grammar, prepared)
    matcher = LLMatcher(prepared, grammar)
    ids = model.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "none"])
def test_calls_in_each_family(name: Any) -> None:
    family = tool_family(name, "")
    spell = family.syntax.spell
    one = reading(family)
    for calls in ([("f", '{"a": 3}')], [("g", "{}"), ("f", '{"a": -1}')]):
        text = spell(calls)
        assert allows(one, text)
        parser = one.new_parser()
        assert parser is not None
        found = parse_whole(parser(), text).calls
        assert [(call.name, call.arguments) for call in found] == calls
    for calls in ([("f", "{}")], [("f", '{"a": "3"}')], [("g", '{"a": 3}')], [("h", "{}")]):
        assert not allows(one, spell(calls))
    assert not allows(one, "")
    assert not allows(one, "Sure. " + spell([("g", "{}")]))


def test_how_many_and_which() -> None:
    family = tool_family("none", "")
    single = reading(family, parallel_tool_calls=False)
    assert allows(single, f"[{ONE}]")
    assert not allows(single, f"[{ONE}, {TWO}]")
    named = reading(family, tool_choice={"type": "function", "function": {"name": "g"}})
    assert allows(named, f"[{TWO}]")
    assert not allows(named, f"[{ONE}]")
    assert not allows(named, f"[{TWO}, {TWO}]")
    many = reading(family)
    assert allows(many, "[" + ", ".join([TWO] * 16) + "]")
    assert not allows(many, "[" + ", ".join([TWO] * 17) + "]")


def test_tags_that_are_special_tokens() -> None:
    model = tokenizer("[TOOL_CALLS]", "</think>", "<think>")
    ids = {text: model.convert_tokens_to_ids(text) for text in model.added_tokens_encoder}
    special = {text: ids[text] for text in ("[TOOL_CALLS]", "</think>", "<think>")}
    family = tool_family("mistral", "")
    one = reading(family, special_ids=special)
    assert one.needs_tags
    assert allows(one, f"[TOOL_CALLS] [{ONE}]", model)
    # The letters of the tag are not the tag.
    assert not allows(one, f"[{ONE}]", model)
    thinking = reading(family, special_ids=special, reasoning="qwen3")
    assert allows(thinking, f"<think>so</think>\n\n[TOOL_CALLS] [{ONE}]", model)
    assert not reading(family).needs_tags


def test_thoughts_before_calls() -> None:
    family = tool_family("none", "")
    free = reading(family, reasoning="qwen3")
    assert allows(free, f"[{ONE}]")
    assert allows(free, f"<think>\nI {{call}} f\n</think>\n\n[{ONE}]")
    inside = reading(family, reasoning="deepseek_r1", prompt="...<think>\n")
    assert allows(inside, f"hm\n</think>\n\n[{ONE}]")
    assert not allows(inside, f"[{ONE}]")
    over = reading(family, reasoning="qwen3", prompt="...<think>\n\n</think>\n\n")
    assert allows(over, f"[{ONE}]")
    assert not allows(over, f"<think>a</think>[{ONE}]")
    for one, text in ((free, f"<think>a</think>[{ONE}]"), (inside, f"a</think>[{ONE}]")):
        parser = one.new_parser()
        assert parser is not None
        answer = parse_whole(parser(), text)
        assert (answer.reasoning, answer.content) == ("a", "")
        assert len(answer.calls) == 1


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (StructuredOutput(kind="json", value=json.dumps(SCHEMA)), '{"b":true}', '{"b":1}'),
        (StructuredOutput(kind="json_object"), '{"x":1}', "[1]"),
        (StructuredOutput(kind="regex", value="a/[0-9]+"), "a/12", "a12"),
        (StructuredOutput(kind="regex", value=r"a\\/b"), r"a\/b", "a/b"),
        (StructuredOutput(kind="choice", value='["yes", "no"]'), "no", "nope"),
        (StructuredOutput(kind="choice", value='["a\x7fb", "no"]'), "a\x7fb", "ab"),
    ],
)
def test_thoughts_before_a_form_and_calls_beside_it(
    form: StructuredOutput, good: str, bad: str
) -> None:
    family = tool_family("hermes", "")
    thinking = reading(family, reasoning="qwen3", form=form, tool_choice="none")
    assert allows(thinking, good)
    assert allows(thinking, f"<think>a</think>\n{good}")
    assert not allows(thinking, bad)
    assert not allows(thinking, f"<think>a</think>\n{bad}")
    either = reading(family, form=form, tool_choice="auto")
    assert allows(either, good)
    assert allows(either, family.syntax.spell([("g", "{}")]))
    assert not allows(either, bad)


def test_what_needs_no_grammar_of_its_own() -> None:
    family = tool_family("hermes", "")
    form = StructuredOutput(kind="grammar", value='start: "a"')
    assert reading(family, form=form, reasoning="qwen3", tool_choice="none").new_parser() is None
    for kept in (None, form, StructuredOutput(kind="json_object")):
        assert reading(family, form=kept, tool_choice="none").structured_output() == kept
    assert reading(family, tool_choice="auto").structured_output() is None


def test_a_bad_schema_is_told_by_the_tools_name() -> None:
    output = StructuredOutput(kind="grammar", value="start: nothing", field="tools")
    factory = GrammarFactory(PLAIN, len(PLAIN), [0])
    try:
        with pytest.raises(RequestError) as caught:
            factory.constraint(output).result(60)
    finally:
        factory.close()
    assert caught.value.field == "tools"
