"""Request bodies of the OpenAI API, and their sampling parameters and options.

Field names, types and defaults follow OpenAI's API; further ones (`extra_body` of the openai
client) have vLLM's names, but for `speculative`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from ....core.errors import RequestError
from ....core.request.sampling_params import PipeliningMode, RequestOptions, SamplingParams
from ..errors import bad_request
from .chat import ChatFields, ChatMessage
from .request_models import RequestModel, StrictModel
from .sampling_fields import MAX_TOKEN_ID, SamplingFields, check_token_ids
from .size_checks import CHAT_REFUSED, COMPLETION_REFUSED, Refused

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
