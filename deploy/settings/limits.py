"""What one request may hold: the limits that operators can change, and their defaults."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ...cluster.checked_settings import Settings
from ...core.errors import RequestError

AtLeastOne = Annotated[int, Field(ge=1)]


class RequestLimits(Settings):
    """Limits of one request. What exceeds one is refused with 400, before any work is done on it.

    The defaults leave room for every use we know of, and bound what a request can cost everybody
    else: the event loop's time, memory, and the engine's time between two steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    max_json_values: AtLeastOne = Field(
        default=250_000, description="numbers, texts, lists and objects of a body together"
    )
    max_json_depth: AtLeastOne = Field(
        default=64, description="lists and objects within each other in one field"
    )
    max_prompts: AtLeastOne = Field(default=256, description="prompts of a completion")
    max_answers: AtLeastOne = Field(default=256, description="answers: n times the prompts")
    max_prompt_chars: AtLeastOne = Field(
        default=1_000_000, description="characters of all prompts, or of all messages, together"
    )
    max_messages: AtLeastOne = Field(default=4096, description="messages of a chat")
    max_content_parts: AtLeastOne = Field(
        default=8192, description="parts of all messages' contents together"
    )
    max_tools: AtLeastOne = Field(default=128, description="tools of a chat")
    max_tools_bytes: AtLeastOne = Field(
        default=262_144, description="bytes of all tools together, as JSON"
    )
    max_stop_texts: AtLeastOne = Field(default=16, description="stop texts")
    max_stop_chars: AtLeastOne = Field(default=4096, description="characters of one stop text")
    max_stop_chars_total: AtLeastOne = Field(
        default=16_384, description="characters of all stop texts together"
    )
    max_listed_tokens: AtLeastOne = Field(
        default=16_384,
        description="ids in each of stop_token_ids, allowed_token_ids and banned_token_ids",
    )
    max_logit_biases: AtLeastOne = Field(default=1024, description="entries of logit_bias")
    max_grammar_bytes: AtLeastOne = Field(
        default=65_536,
        description="bytes of a JSON schema, regular expression, grammar or list of choices",
    )
    max_choices: AtLeastOne = Field(default=1024, description="texts of a list of choices")
    max_logprob_entries: AtLeastOne = Field(
        default=200_000,
        description="log-probabilities of the prompts in an answer: for every token of every "
        "prompt and choice its own, and those of prompt_logprobs others",
    )
    max_answer_logprobs: AtLeastOne = Field(
        default=4_000_000,
        description="log-probabilities of all answers: for every token that max_tokens allows its "
        "own, and those of logprobs others",
    )
    max_detokenize_tokens: AtLeastOne = Field(
        default=131_072, description="token ids of one call of /detokenize"
    )
    max_bad_words: AtLeastOne = Field(default=256, description="texts of bad_words")
    max_named_drafters: AtLeastOne = Field(default=64, description="names of speculative.drafters")

    def require(self, name: str, given: int, field: str, unit: str) -> None:
        """Raise `RequestError` for `field` where `given` exceeds the limit of this name.

        `unit`: what is counted, in the plural.
        """
        most = getattr(self, name)
        if given > most:
            raise RequestError(
                field, f"{given} {unit}; at most {most} are allowed (limits.{name} of the server)"
            )


DEFAULT_LIMITS = RequestLimits()
