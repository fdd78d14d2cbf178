"""Limits of one request: those that operators can change, and fixed ones."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from ...cluster.checked_settings import Settings
from ...core.errors import RequestError

AtLeastOne = Annotated[int, Field(ge=1)]


class RequestLimits(Settings):
    """Limits of one request. What exceeds one is refused with 400, before any work is done on it.

    The defaults leave room for every use we know of, and bound what a request can cost the
    others: the event loop's time, memory, and the engine's time between two steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    max_prompts: AtLeastOne = Field(default=256, description="prompts of a completion")
    max_prompt_chars: AtLeastOne = Field(
        default=1_000_000, description="characters of all prompts, or of all messages, together"
    )

    # Fixed: far beyond every use we know of.
    # Answers: n times the prompts.
    max_answers: ClassVar[int] = 256
    # Messages of a chat.
    max_messages: ClassVar[int] = 4096
    # Numbers, texts, lists and objects of a body together.
    max_json_values: ClassVar[int] = 250_000
    # Lists and objects within each other in one field.
    max_json_depth: ClassVar[int] = 64
    # Parts of all messages' contents together.
    max_content_parts: ClassVar[int] = 8192
    # Tools of a chat.
    max_tools: ClassVar[int] = 128
    # Bytes of all tools together, as JSON.
    max_tools_bytes: ClassVar[int] = 262_144
    # Stop texts.
    max_stop_texts: ClassVar[int] = 16
    # Characters of one stop text.
    max_stop_chars: ClassVar[int] = 4096
    # Characters of all stop texts together.
    max_stop_chars_total: ClassVar[int] = 16_384
    # Ids in each of stop_token_ids, allowed_token_ids and banned_token_ids.
    max_listed_tokens: ClassVar[int] = 16_384
    # Entries of logit_bias.
    max_logit_biases: ClassVar[int] = 1024
    # Bytes of a JSON schema, regular expression, grammar or list of choices.
    max_grammar_bytes: ClassVar[int] = 65_536
    # Texts of a list of choices.
    max_choices: ClassVar[int] = 1024
    # Log-probabilities of the prompts in an answer: for every token of every prompt and choice its
    # own, and those of prompt_logprobs others.
    max_logprob_entries: ClassVar[int] = 200_000
    # Log-probabilities of all answers: for every token that max_tokens allows its own, and those of
    # logprobs others.
    max_answer_logprobs: ClassVar[int] = 4_000_000
    # Token ids of one call of /detokenize.
    max_detokenize_tokens: ClassVar[int] = 131_072
    # Texts of bad_words.
    max_bad_words: ClassVar[int] = 256
    # Names of speculative.drafters.
    max_named_drafters: ClassVar[int] = 64

    def require(self, name: str, given: int, field: str, unit: str) -> None:
        """Raise `RequestError` for `field` where `given` exceeds the limit of this name.

        `unit`: what is counted, in the plural.
        """
        most = getattr(self, name)
        if given > most:
            where = f" (limits.{name} of the server)" if name in type(self).model_fields else ""
            raise RequestError(field, f"{given} {unit}; at most {most} are allowed{where}")


DEFAULT_LIMITS = RequestLimits()
