"""Request bodies of the OpenAI API, and their sampling parameters and options.

Field names, types and defaults follow OpenAI's API; further ones (`extra_body` of the openai
client) have vLLM's names, but for `speculative`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from ....core.errors import RequestError, shortened
from ....core.request.allowed_tokens import StructuredOutput
from ....core.request.sampling_params import PipeliningMode, RequestOptions, SamplingParams
from ..errors import ApiError, bad_request
from .chat import ChatFields, ChatMessage
from .request_models import CHAT_REFUSED, COMPLETION_REFUSED, Refused, RequestModel, StrictModel


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


DEFAULT_COMPLETION_TOKENS = 16
MAX_TOP_LOGPROBS = 20
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_LISTS = [{"type": "array", "items": item, "minItems": 1} for item in (_TEXT, _TOKENS)]
PROMPT_SCHEMA = {"anyOf": [_TEXT, _TOKENS, *_LISTS]}


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class SpeculativeOptions(StrictModel):
    """How to draft for a request; none of it changes the answer.

    enabled     whether to draft at all
    max_tokens  most drafted tokens in one step
    max_context tokens of prompt and answer beyond which nothing is drafted
    drafters    names of the drafters to take proposals of, where the node budget asks them
    pipelined_trees  whether its tree goes through the stages in chunks, several at a time; see
                `RequestOptions`
    report      name the source of every token in `draftline`
    explain     `report`, and the tree of every step; of streams, for the operator
    """

    enabled: bool = True
    max_tokens: int | None = None
    max_context: int | None = None
    drafters: list[str] | None = None
    pipelined_trees: PipeliningMode = "auto"
    report: bool = False
    explain: bool = False


class GenerationRequest(SamplingFields):
    """The fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str = ""
    store: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    return_token_ids: bool | None = None
    speculative: SpeculativeOptions = SpeculativeOptions()

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs does not go with a stream")
        if self.speculative.explain and not self.stream:
            raise ValueError("speculative.explain needs stream: true")
        return self

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1, or -1: as many as fit")
        return value

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def cut_prompt(self, prompt: Sequence[int], context: int) -> Sequence[int]:
        """The last tokens of the prompt, as many as `truncate_prompt_tokens` leaves.

        -1 leaves as many as fit a context of so many tokens with the answer.
        """
        most = self.truncate_prompt_tokens
        if most == -1:
            limit = self.token_limit[1]
            most = max(context - (1 if limit is None else limit), 1)
        return prompt if most is None or len(prompt) <= most else prompt[len(prompt) - most :]

    def request_options(self) -> RequestOptions:
        """How to serve this body. Raises `ApiError` 400 naming the field."""
        try:
            return RequestOptions(
                priority=self.priority,
                cache_salt=self.cache_salt,
                # No answer is kept for the client; what the field forbids is to learn from it.
                store=self.store is not False,
                speculative=self.speculative.enabled,
                max_nodes=self.speculative.max_tokens,
                max_context=self.speculative.max_context,
                drafters=_as_tuple(self.speculative.drafters),
                pipelined_trees=self.speculative.pipelined_trees,
                explain=self.speculative.explain,
            )
        except RequestError as error:
            raise bad_request(error.field, error.message) from error


def _as_tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`; the prompt is a text, a list of token ids, or a list of either."""

    refused: ClassVar[Mapping[str, Refused]] = COMPLETION_REFUSED
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, info.data.get("n") or 1):
            raise ValueError("not supported: leave it out or send the value of n")
        return value

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has log-probabilities of the prompt, or echoes it."""
        return bool(self.echo) or super().scores_prompt

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        many = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
        prompts = value if many else [value]
        return tuple(_one_prompt(prompt) for prompt in prompts)

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs` itself."""
        return self.logprobs

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """The sampling; an echoed prompt has log-probabilities where the answer has."""
        params = super().sampling_params(max_tokens)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            return replace(params, prompt_logprobs=self.logprobs)
        return params


def _one_prompt(value: Any) -> str | tuple[int, ...]:
    if not value and isinstance(value, str | list):
        raise ValueError("must not be empty")
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return check_token_ids(value)
    raise ValueError("must be a text, a list of token ids, or a list of either")


class ChatRequest(GenerationRequest, ChatFields):
    """`POST /v1/chat/completions`; without a limit the answer may fill the context.

    include_reasoning  whether reasoning is sent, where the server separates it
    """

    refused: ClassVar[Mapping[str, Refused]] = CHAT_REFUSED
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    include_reasoning: bool = True
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`top_logprobs` where `logprobs` asks for any."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens disagree; send one of them")
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value; the newer of two names wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class TokenizeRequest(RequestModel, ChatFields):
    """`POST /tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]

    @field_validator("tokens", mode="before")
    @classmethod
    def _check_tokens(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("must be a list of token ids")
        return list(check_token_ids(value))


class ChatForm(GenerationRequest):
    """The sampling fields beyond its API's are those of chats.

    names  of a chat's fields in this body
    """

    names: ClassVar[Mapping[str, str]] = {}

    @field_validator("speculative")
    @classmethod
    def _check_explain(cls, value: SpeculativeOptions) -> SpeculativeOptions:
        if value.explain:
            raise ValueError("explain: see /v1/chat/completions")
        return value

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """Messages, tools, and what else is spelled otherwise in a chat."""
        ...

    def chat(self) -> ChatRequest:
        """The chat that this body stands for. Raises `ApiError` 400 naming the field."""
        shared = self.model_fields_set & GenerationRequest.model_fields.keys()
        body = {name: getattr(self, name) for name in shared - set(self.refused)}
        try:
            return ChatRequest.build(body | self.chat_fields())
        except ApiError as error:
            raise self.named_here(error) from error

    def named_here(self, error: ApiError) -> ApiError:
        """An error of a chat, with the names that its fields have in this body."""
        name = error.param or ""
        field = self.names.get(name.split(".")[0], name.replace(".function", ""))
        if field == name:
            return error
        return bad_request(field, error.message.removeprefix(f"{name}: "))
