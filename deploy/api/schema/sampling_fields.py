"""The sampling fields of a request, and those that limit its answer.

A structured answer has two spellings: OpenAI's `response_format` and vLLM's own field.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ....core.errors import RequestError, shortened
from ....core.request.allowed_tokens import StructuredOutput
from ....core.request.sampling_params import SamplingParams
from ..errors import bad_request
from .request_models import RequestModel, StrictModel


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
        forms = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in forms) != 1:
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


MAX_TOKEN_ID = 2**31 - 1
MAX_ID_DIGITS = 10
# Fields that `SamplingParams` has under the same name.
SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "ignore_eos", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs",
    "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


class SamplingFields(RequestModel):
    """OpenAI's fields, and those that users of vLLM know."""

    n: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=MAX_TOKEN_ID)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    # -1 is vLLM's and SGLang's way to ask for any.
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None

    @field_validator("stop_token_ids", "allowed_token_ids", "banned_token_ids")
    @classmethod
    def _check_ids(cls, value: list[int] | None) -> list[int] | None:
        return None if value is None else list(check_token_ids(value))

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            is_id = len(key) <= MAX_ID_DIGITS and key.isascii() and key.isdigit()
            if not is_id or int(key) > MAX_TOKEN_ID:
                raise ValueError(f"{shortened(key)} is not a token id")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if texts is None:
            return None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("must be a text or a list of texts")
        return texts

    @model_validator(mode="after")
    def _check_form(self) -> SamplingFields:
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("send either response_format or structured_outputs")
        return self

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer is about the prompt, so that no token need be generated."""
        return self.prompt_logprobs is not None

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Tokens whose log-probabilities stand beside each of the answer's; None: none at all."""
        ...

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """The sampling that this body asks for; None: as many tokens as fit.

        Raises `ApiError` 400 naming the field.
        """
        if max_tokens == 0 and not self.scores_prompt:
            name = self.token_limit[0]
            raise bad_request(name, "must be at least 1, or 0 with echo or prompt_logprobs")
        given = {name: getattr(self, name) for name in SAME_NAMES}
        given = {name: value for name, value in given.items() if value is not None}
        # Both ways of saying "off".
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if given.get("seed") == -1:
            del given["seed"]
        allowed = self.allowed_token_ids
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                stop=tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
                allowed_token_ids=None if allowed is None else tuple(allowed),
                banned_token_ids=tuple(self.banned_token_ids or ()),
                bad_words=tuple(self.bad_words or ()),
                structured_output=self.structured_output_form(),
                logprobs=self.num_logprobs,
                **given,
            )
        except RequestError as error:
            raise bad_request(self._own_name(error.field), error.message) from error

    def structured_output_form(self) -> StructuredOutput | None:
        """The form of the answer in either spelling; None: any text. Raises `RequestError`."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structured_output()
        return None if self.response_format is None else self.response_format.structured_output()

    def _own_name(self, field: str) -> str:
        return self.token_limit[0] if field == "max_tokens" else field


def check_token_ids(value: list[Any]) -> tuple[int, ...]:
    """Token ids as a tuple. Raises `ValueError`."""
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise ValueError(f"{shortened(item)} is not a token id")
    return tuple(value)
