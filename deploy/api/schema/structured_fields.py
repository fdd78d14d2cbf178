"""The two spellings of a structured answer: OpenAI's `response_format` and vLLM's own field."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from ....core.structured_output import StructuredOutput
from .request_models import StrictModel


class JsonSchemaFormat(StrictModel):
    """`json_schema` of a response format. The form is exact, also where `strict` does not ask."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self

    def structured_output(self) -> StructuredOutput | None:
        """The form of the answer; None: any text. A schema that is left out allows any object."""
        if self.json_schema is not None and self.json_schema.json_schema is not None:
            schema = json.dumps(self.json_schema.json_schema)
            return StructuredOutput(kind="json", value=schema)
        return None if self.type == "text" else StructuredOutput(kind="json_object")


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: exactly one of the fields.

    json         a JSON schema, as an object or a text
    json_object  true: any JSON object
    grammar      a context-free grammar in Lark's syntax
    """

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        given = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            raise ValueError("send one of json, json_object, regex, choice and grammar")
        return self

    def structured_output(self) -> StructuredOutput:
        """The form of the answer. Raises `RequestError`."""
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return StructuredOutput(kind="json", value=text)
        if self.regex is not None:
            return StructuredOutput(kind="regex", value=self.regex)
        if self.choice is not None:
            return StructuredOutput(kind="choice", value=json.dumps(self.choice))
        if self.grammar is not None:
            return StructuredOutput(kind="grammar", value=self.grammar)
        return StructuredOutput(kind="json_object")
