"""From a chat request to what the engine is asked, and how its text is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....core.errors import RequestError
from ....core.request.allowed_tokens import StructuredOutput
from ....core.request.sampling_params import SamplingParams
from ....models.text.chat_template import ChatOptions
from ....models.text.grammar_messages import lark_choice, lark_regex, lark_text
from ...settings.settings import ReasoningParserName, ServerConfig
from ..engine_client import TextCodec
from ..errors import bad_request
from ..schema.chat import AllowedToolsChoice, ChatFields, ChatMessage, NamedTool, Tool, ToolFields
from .call_parsers import MAX_SPACE, overlap
from .call_syntax import (
    CallSyntax,
    ForcedCallParser,
    ToolFamily,
    call_grammar,
    explain_tools,
    literal,
    tool_family,
)
from .events import Content, Event, Parser, ReasoningDelta


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The tools in the prompt, and those of them that the model may call.

    must      it has to call one
    is_named  it has to call exactly this one, once
    """

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    must: bool = False
    is_named: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools that may be called."""
        return tuple(tool.function.name for tool in self.callable)


def choose_tools(fields: ToolFields) -> ChosenTools:
    """The tools by `tools` and `tool_choice`. Raises `ApiError` 400 naming the field."""
    tools, choice = tuple(fields.tools or ()), fields.tool_choice
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise bad_request("tools", "two tools have one name")
    if not tools:
        if choice in (None, "none", "auto"):
            return ChosenTools()
        raise bad_request("tool_choice", "needs tools")
    match choice:
        case "none":
            return ChosenTools()
        case NamedTool():
            return ChosenTools(tools, _named([choice], by_name), must=True, is_named=True)
        case AllowedToolsChoice():
            allowed = _named(choice.allowed_tools.tools, by_name)
            return ChosenTools(tools, allowed, must=choice.allowed_tools.mode == "required")
    return ChosenTools(tools, tools, must=choice == "required")


def call_limit(fields: ToolFields, chosen: ChosenTools) -> int | None:
    """Most calls of the answer; None: the server's own limit."""
    return 1 if chosen.is_named or fields.parallel_tool_calls is False else None


def _named(named: Collection[NamedTool], by_name: dict[str, Tool]) -> tuple[Tool, ...]:
    names = dict.fromkeys(tool.function.name for tool in named)
    unknown = next((name for name in names if name not in by_name), None)
    if unknown is not None:
        raise bad_request("tool_choice", f"{unknown!r} is not one of the tools")
    return tuple(by_name[name] for name in names)


THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


def ends_inside(prompt: str) -> bool:
    """Whether a prompt ends inside of `<think>`, so that the answer continues it."""
    return prompt.rstrip().endswith(THINK_OPEN)


def ends_behind(prompt: str) -> bool:
    """Whether a prompt ends with reasoning that is over, such as an empty one."""
    return prompt.rstrip().endswith(THINK_CLOSE)


class ReasoningParser:
    """Splits one answer; what follows the reasoning goes to `then`.

    White space around the reasoning, and line ends before what follows it, are left out.
    """

    def __init__(self, then: Parser, *, inside: bool) -> None:
        """inside: the answer begins with reasoning, whether or not it opens it."""
        self._then = then
        self._buffer = ""
        self._inside = inside
        self._has_thought = False
        self._state: Callable[[], list[Event] | None] = self._begin

    def push(self, text: str) -> list[Event]:
        """Events that become certain with the next piece of text."""
        self._buffer += text
        events: list[Event] = []
        while (more := self._state()) is not None:
            events += more
        return events

    def finish(self) -> list[Event]:
        """The rest, after the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._thinking:
            return [*self._thought(rest.rstrip()), *self._then.finish()]
        if self._state == self._between:
            return self._then.finish()
        is_thought = self._inside and self._state == self._begin and rest.strip()
        events = self._thought(rest.strip()) if is_thought else self._then.push(rest)
        return [*events, *self._then.finish()]

    # A state takes the start of the buffer; None: it needs more text.

    def _begin(self) -> list[Event] | None:
        text = self._buffer.lstrip()
        is_near = len(self._buffer) - len(text) <= MAX_SPACE
        if is_near and text.startswith(THINK_OPEN):
            self._buffer = text[len(THINK_OPEN) :]
            self._inside = True
            self._state = self._thinking
        elif is_near and THINK_OPEN.startswith(text):
            return None
        else:
            self._buffer = text if self._inside else self._buffer
            self._state = self._thinking if self._inside else self._answer
        return []

    def _thinking(self) -> list[Event] | None:
        """Space at the end is held back: it may be the last of the reasoning."""
        if not self._has_thought:
            self._buffer = self._buffer.lstrip()
        end = self._buffer.find(THINK_CLOSE)
        if end >= 0:
            thought, self._buffer = self._buffer[:end], self._buffer[end + len(THINK_CLOSE) :]
            self._state = self._between
            return self._thought(thought.rstrip())
        sure = self._buffer[: len(self._buffer) - overlap(self._buffer, THINK_CLOSE)].rstrip()
        self._buffer = self._buffer[len(sure) :]
        return self._thought(sure) or None

    def _between(self) -> list[Event] | None:
        self._buffer = self._buffer.lstrip("\r\n")
        if not self._buffer:
            return None
        self._state = self._answer
        return []

    def _answer(self) -> list[Event] | None:
        rest, self._buffer = self._buffer, ""
        return self._then.push(rest) if rest else None

    def _thought(self, text: str) -> list[Event]:
        self._has_thought = self._has_thought or bool(text)
        return [ReasoningDelta(text)] if text else []


class PlainParser:
    """An answer without calls: all of it is content."""

    def push(self, text: str) -> list[Event]:
        """The text itself."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReading:
    """How the tokens of one request's answer are read: reasoning, calls of tools, content.

    form         the structured output that the request asks for
    max_calls    most calls of the answer; None: as many as the model makes
    special_ids  the model's special tokens
    prompt       the rendered chat, whose end shows whether reasoning has begun
    """

    chosen: ChosenTools
    family: ToolFamily
    reasoning: ReasoningParserName
    form: StructuredOutput | None
    max_calls: int | None
    special_ids: Mapping[str, int]
    prompt: str

    @property
    def needs_tags(self) -> bool:
        """Whether special tokens must have text, for the parser to find them."""
        tags: set[str] = set()
        if self._calls:
            tags.update(self.family.syntax.tags)
            tags.update(() if self.family.parser is None else (self.family.parser.tag,))
        if self._thinks:
            tags.update((THINK_OPEN, THINK_CLOSE))
        return not tags.isdisjoint(self.special_ids)

    def structured_output(self) -> StructuredOutput | None:
        """The form of the whole answer, reasoning and calls included. Raises `RequestError`."""
        thinking = ""
        if self._thinks and not ends_behind(self.prompt):
            thinking = thinking_rules(self.special_ids, has_begun=ends_inside(self.prompt))
        if self.chosen.must:
            return _grammar(with_start(self._call_rules(), "calls", thinking), "tools")
        rules = None if self.form is None else form_rules(self.form)
        if rules is None or not (thinking or self._calls):
            return self.form
        if self._calls:
            rules = f"{rules}\n{self._call_rules()}"
        body = "(calls | form)" if self._calls else "form"
        return _grammar(with_start(rules, body, thinking), "response_format")

    def new_parser(self) -> Callable[[], Parser] | None:
        """A factory of the answer's parser; None: the text is the content."""
        after = self._call_parser()
        if not self._thinks:
            return after
        starts_inside = ends_inside(self.prompt)
        if self.reasoning == "deepseek_r1" and not ends_behind(self.prompt):
            # These models always begin with reasoning, also without `<think>`.
            starts_inside = starts_inside or not self._is_formed
        then = after or PlainParser
        return lambda: ReasoningParser(then(), inside=starts_inside)

    def _call_parser(self) -> Callable[[], Parser] | None:
        family, names = self.family, self.chosen.names
        if self.chosen.must:
            return lambda: ForcedCallParser(family.syntax, family.new_id)
        parser = family.parser
        if not self._calls or parser is None:
            return None
        return lambda: parser(names, family.new_id, self.max_calls)

    def _call_rules(self) -> str:
        functions = [tool.function for tool in self.chosen.callable]
        return call_grammar(
            self.family.syntax, functions, self.special_ids, max_calls=self.max_calls
        )

    @property
    def _calls(self) -> bool:
        return bool(self.chosen.callable)

    @property
    def _thinks(self) -> bool:
        """Whether reasoning may come first; a client's grammar holds from the first token."""
        has_grammar = self.form is not None and self.form.kind == "grammar"
        return self.reasoning != "none" and not has_grammar

    @property
    def _is_formed(self) -> bool:
        """Whether a grammar says how the answer begins: with `<think>`, or without thoughts."""
        return self.chosen.must or self.form is not None


def _grammar(text: str, field: str) -> StructuredOutput:
    return StructuredOutput(kind="grammar", value=text, field=field)


def with_start(rules: str, body: str, thinking: str) -> str:
    """A whole grammar: `thinking` (see `thinking_rules`) and then the rule `body`."""
    if not thinking:
        return f"start: {body}\n{rules}\n"
    return f"start: thinking {body}\n{thinking}\n{rules}\n"


def thinking_rules(special_ids: Mapping[str, int], *, has_begun: bool) -> str:
    """The rule `thinking`: optional reasoning before the answer.

    has_begun  the prompt ends inside of it already
    """
    close = special_ids.get(THINK_CLOSE)
    if close is None:
        thought = f"thought[suffix={lark_text(THINK_CLOSE)}]: /(.|\\n)*/"
    else:
        thought = f"thought: /(.|\\n)*/ <[{close}]>"
    begin = "" if has_begun else literal(THINK_OPEN, special_ids) + " "
    thinking = f"{begin}thought /\\s*/"
    return f"thinking: {thinking if has_begun else f'({thinking})?'}\n{thought}"


def form_rules(output: StructuredOutput) -> str | None:
    """The rule `form` for a structured output; None if it cannot follow reasoning.

    Raises `RequestError`.
    """
    match output.kind:
        case "json_object":
            return 'form: %json {"type": "object"}'
        case "json":
            return f"form: %json {json.dumps(_json(output))}"
        case "regex":
            return f"form: {lark_regex(output.value)}"
        case "choice":
            return f"form: {lark_choice(_json(output))}"
        case "grammar":
            return None


def _json(output: StructuredOutput) -> Any:
    try:
        return json.loads(output.value)
    except (ValueError, RecursionError) as error:
        raise RequestError("structured_outputs", f"is not valid JSON: {error}") from None


Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """How one chat is answered.

    prompt             token ids
    structured_output  a form in place of the request's own; None: the request's own
    keeps_tags         special tokens have text, for the parser to find them
    new_parser         reads one answer; None: its text is its content
    """

    prompt: tuple[int, ...]
    structured_output: StructuredOutput | None = None
    keeps_tags: bool = False
    new_parser: Callable[[], Parser] | None = None

    def shape(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters of the request with what the plan adds to them."""
        if self.keeps_tags:
            params = replace(params, skip_special_tokens=False)
        if self.structured_output is not None:
            params = replace(params, structured_output=self.structured_output)
        return params


class ChatPlanner:
    """Makes prompts and plans for one model, as its server's settings say."""

    def __init__(self, codec: TextCodec, config: ServerConfig) -> None:
        self._codec = codec
        self._config = config
        self._family = tool_family(config.tool_call_parser, codec.template.source)

    async def encode(self, fields: ChatFields, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The prompt of a chat alone. Raises `ApiError` 400 and `RequestError`."""
        chosen = choose_tools(fields)
        text = await self._render(self._options(fields, chosen), messages, chosen)
        return await self._codec.encode(text, special=False)

    async def plan(
        self,
        fields: ChatFields,
        messages: Sequence[ChatMessage],
        form: StructuredOutput | None,
    ) -> ChatPlan:
        """Everything that a chat asks for. `form` is the structured output of the request.

        Raises `ApiError` 400 naming the field, and `RequestError`.
        """
        chosen = choose_tools(fields)
        _check_choice(chosen, self._family, form)
        text = await self._render(self._options(fields, chosen), messages, chosen)
        reading = AnswerReading(
            chosen=chosen,
            family=self._family,
            reasoning=self._config.reasoning_parser,
            form=form,
            max_calls=call_limit(fields, chosen),
            special_ids=self._codec.special_ids,
            prompt=text,
        )
        return ChatPlan(
            prompt=await self._codec.encode(text, special=False),
            structured_output=reading.structured_output(),
            keeps_tags=reading.needs_tags,
            new_parser=reading.new_parser(),
        )

    def _options(self, fields: ChatFields, chosen: ChosenTools) -> ChatOptions:
        trusted = self._config.trust_request_chat_template
        return fields.chat_options(chosen.tools, trust_template=trusted)

    async def _render(
        self, options: ChatOptions, messages: Sequence[ChatMessage], chosen: ChosenTools
    ) -> str:
        rendered = [message.for_template() for message in messages]
        if options.template is None and "tools" not in self._codec.template.variables:
            rendered = _without_tools(rendered, chosen, self._family.syntax)
            options = replace(options, tools=None)
        return await self._codec.render_chat(rendered, options)


def _check_choice(chosen: ChosenTools, family: ToolFamily, form: StructuredOutput | None) -> None:
    if chosen.must and form is not None:
        raise bad_request("tool_choice", "a call that must be made leaves no room for a form")
    if chosen.callable and not chosen.must and family.parser is None:
        raise bad_request(
            "tool_choice",
            "this server does not know how its model calls tools by itself; send 'required', a "
            "named function or 'none', or start it with --tool-call-parser hermes, llama3_json or "
            "mistral",
        )
    if chosen.callable and form is not None and form.kind == "grammar":
        raise bad_request("structured_outputs", "a grammar does not go with tools")


def _without_tools(messages: Messages, chosen: ChosenTools, syntax: CallSyntax) -> Messages:
    """A chat for a template without tools: tools and calls are written as text."""
    plain = [_spelled(message, syntax) for message in messages]
    if not chosen.tools:
        return plain
    about = explain_tools(syntax, [tool.for_template() for tool in chosen.tools], must=chosen.must)
    if plain[0]["role"] in ("system", "developer"):
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{about}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": about}, *plain]


def _spelled(message: dict[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    spelled = syntax.spell(_spelled_call(call["function"]) for call in calls)
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    text = f"{message['content']}\n{spelled}" if message["content"] else spelled
    return {**others, "content": text}


def _spelled_call(function: dict[str, Any]) -> tuple[str, str]:
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    return function["name"], arguments if is_text else json.dumps(arguments, ensure_ascii=False)
