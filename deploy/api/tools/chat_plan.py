"""From a chat request to what the engine is asked, and how its text is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....core.request.allowed_tokens import StructuredOutput
from ....core.request.sampling_params import SamplingParams
from ....models.text.chat_template import ChatOptions
from ...settings.settings import ServerConfig
from ..engine_client import TextCodec
from ..errors import bad_request
from ..schema.chat import ChatFields, ChatMessage
from .call_syntax import CallSyntax, ToolFamily, explain_tools, tool_family
from .events import Parser
from .reading import AnswerReading, ChosenTools, call_limit, choose_tools

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
