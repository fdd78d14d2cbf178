"""How each family of models spells calls: one exact spelling, for calls that must be made and for
showing calls to models whose chat template knows none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Most calls of an answer that must make some: a weak model would repeat itself for ever.
MAX_FORCED_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The text around the names and arguments of calls.

    before, after  around all calls
    open           up to the name; between: up to the arguments; close: behind them
    separator      between calls
    tags           the texts that may be special tokens of a model
    """

    before: str = ""
    open: str
    between: str
    close: str
    separator: str
    after: str = ""
    tags: tuple[str, ...] = ()

    def spell(self, calls: Iterable[tuple[str, str]]) -> str:
        """The text of calls, given as names and arguments."""
        texts = [f"{self.open}{name}{self.between}{args}{self.close}" for name, args in calls]
        return f"{self.before}{self.separator.join(texts)}{self.after}"


HERMES = CallSyntax(
    open='<tool_call>\n{"name": "',
    between='", "arguments": ',
    close="}\n</tool_call>",
    separator="\n",
    tags=("<tool_call>", "</tool_call>"),
)
LLAMA = CallSyntax(open='{"name": "', between='", "parameters": ', close="}", separator="; ")
MISTRAL = CallSyntax(
    before="[TOOL_CALLS] [",
    open='{"name": "',
    between='", "arguments": ',
    close="}",
    separator=", ",
    after="]",
    tags=("[TOOL_CALLS]",),
)
PLAIN_JSON = CallSyntax(
    before="[",
    open='{"name": "',
    between='", "arguments": ',
    close="}",
    separator=", ",
    after="]",
)


def explain_tools(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], *, must: bool) -> str:
    """What a model is told of tools that its chat template does not know."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = syntax.spell([("NAME", '{"ARGUMENT": VALUE}')])
    when = "Answer by calling" if must else "Where it helps, answer by calling"
    return (
        f"You can call these tools, each described by a JSON schema:\n{listed}\n\n"
        f"{when} one or more of them, in exactly this form:\n{example}"
    )
