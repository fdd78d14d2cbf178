"""A model's chat template: renders chats, and lists the template's variables."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from ...core.errors import RequestError

# Errors of a template on unexpected messages, besides its own exceptions.
TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    RecursionError,
)  # fmt: skip
# Messages that a template's error repeats from a request are cut to this many characters.
MAX_ERROR_CHARS = 200
TEMPLATE_FILE = "<template>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a chat becomes a prompt.

    tools           JSON schemas of the tools, for templates that support them; None: no tools
    documents       texts to answer from, for templates that support them
    open_answer     open the assistant's answer at the end
    continue_final  leave the last message open, to be continued
    variables       further variables of the template
    template        a template to use in place of the model's own
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    open_answer: bool = True
    continue_final: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None


class CallArguments(dict[str, Any]):
    """The arguments of a call in a message; `text` is their JSON as the client sent it."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self.text = text


class ChatTemplate:
    """The template of a tokenizer, run in jinja's sandbox."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer

    @cached_property
    def source(self) -> str:
        """The template's text, that for tools if there are several; "": there is none."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):
            return template.get("tool_use") or template.get("default") or ""
        return template or ""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set itself, such as `tools`."""
        environment = ImmutableSandboxedEnvironment(
            extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
        )
        try:
            return frozenset(meta.find_undeclared_variables(environment.parse(self.source)))
        except TemplateError:
            # Template extensions such as transformers' `generation` blocks.
            return frozenset(name for name in ("tools", "documents") if name in self.source)

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Reserved names that a request's own variables must not use."""
        taken = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset(taken) | {"conversations", "messages", "self"}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        *,
        timeout_s: float | None = None,
    ) -> str:
        """The prompt of a chat.

        timeout_s stops a template that runs longer, at the cost of tracing the thread. Raises
        `RequestError` if there is no template, or it refuses the chat.
        """
        if not (options.template or self.source):
            raise RequestError(
                "messages", "this model has no chat template; use /v1/completions with a prompt"
            )
        self._check_variables(options.variables)
        try:
            with _deadline(timeout_s):
                return self._render_either(messages, options)
        except TEMPLATE_ERRORS as error:
            reason = str(error)[:MAX_ERROR_CHARS] or type(error).__name__
            raise RequestError("messages", f"the chat template refuses them: {reason}") from error
        except _TooLong:
            raise RequestError(
                "messages", f"the chat template ran longer than {timeout_s:g} s"
            ) from None

    def _render_either(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """With the arguments of calls as objects, or as texts for templates that add texts to them.

        There is no declaration of the expected form: a template fails on the other one.
        """
        try:
            return self._render(messages, options)
        except TEMPLATE_ERRORS:
            if not any(message.get("tool_calls") for message in messages):
                raise
            with suppress(*TEMPLATE_ERRORS):
                return self._render([_with_texts(message) for message in messages], options)
            raise

    def _render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        given = {"chat_template": options.template} if options.template is not None else {}
        return self._tokenizer.apply_chat_template(
            [_known_role(message, options.template or self.source) for message in messages],
            tools=None if options.tools is None else list(options.tools),
            documents=None if options.documents is None else list(options.documents),
            add_generation_prompt=options.open_answer,
            continue_final_message=options.continue_final,
            tokenize=False,
            **given,
            **options.variables,
        )

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in self.reserved:
                raise RequestError("chat_template_kwargs", f"{name!r} cannot be set by a request")


def _known_role(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Map the developer role to system for templates without the former."""
    if message["role"] == "developer" and "developer" not in source:
        return {**message, "role": "system"}
    return dict(message)


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as the client sent them."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        text = arguments.text if isinstance(arguments, CallArguments) else arguments
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else dict(message)


class _TooLong(BaseException):
    """Raised when a template's time is over.

    Not an `Exception`, which a template's own calls might swallow.
    """


@contextmanager
def _deadline(timeout_s: float | None) -> Iterator[None]:
    """Stop a template in this thread after a timeout; other code is not traced."""
    if timeout_s is None:
        yield
        return
    end = time.monotonic() + timeout_s

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        if time.monotonic() > end:
            raise _TooLong
        return trace if frame.f_code.co_filename == TEMPLATE_FILE else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
