"""What form an answer to a chat must have, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....core.request.constraint import StructuredOutput
from ...settings.settings import ReasoningParserName
from .call_grammar import call_grammar, form_rules, thinking_rules, with_start
from .call_syntax import ToolFamily
from .choice import ChosenTools
from .events import Parser
from .forced_calls import ForcedCallParser
from .reasoning import (
    THINK_CLOSE,
    THINK_OPEN,
    PlainParser,
    ReasoningParser,
    ends_behind,
    ends_inside,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReading:
    """How the tokens of one request's answer are read: reasoning, calls of tools, content.

    form         the structured output that the request asks for
    max_calls    most calls of the answer; None: as many as the model makes
    special_ids  the model's special tokens
    prompt       the rendered chat, whose end tells whether reasoning has begun
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
        """Makes what reads one answer; None: its text is its content."""
        after = self._call_parser()
        if not self._thinks:
            return after
        starts_inside = ends_inside(self.prompt)
        if self.reasoning == "deepseek_r1" and not ends_behind(self.prompt):
            # These models begin with their thoughts, whether or not they say so.
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
