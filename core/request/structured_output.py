"""A form that an answer must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import RequestError

Kind = Literal["json_object", "json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What an answer must match, whole.

    kind   json_object: any JSON object; json: a JSON schema; regex; choice: one of some texts;
           grammar: a context-free grammar in Lark's syntax
    value  the schema as JSON, the expression, the texts as a JSON list, or the grammar
    field  the name of the request's field that asked for it, for errors

    Raises `RequestError`; whether the value can be used is checked with the model's tokenizer.
    """

    kind: Kind
    value: str = ""
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise RequestError("structured_outputs", f"{self.kind!r} is unknown; known: {known}")
        if self.kind != "json_object" and not self.value:
            raise RequestError("structured_outputs", f"{self.kind} must not be empty")
