"""A user's sampling parameters, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import RequestError
from .structured_output import StructuredOutput

MAX_SEED = 2**63 - 1
MAX_LOG_PROBS = 20
MAX_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    max_tokens      most tokens to generate; None: up to the model's context
    temperature     0 is greedy
    top_k           keep the k most probable tokens; 0 is off
    top_p           keep the smallest set of tokens with at least this probability; 1 is off
    min_p           drop tokens less probable than this times the most probable; 0 is off
    typical_p       keep the tokens of nearly expected surprise up to this probability; 1 is off
    seed            of the sampling noise: one seed, one text, with any drafters; None: random
    stop            texts that end the answer; they are not part of it
    stop_token_ids  tokens that end the answer; they are part of `token_ids`, not of the text
    ignore_eos      go on after the model's end-of-sequence token
    min_tokens      neither a token nor a text ends the answer before it has so many
    repetition_penalty  makes tokens of prompt and answer less likely above 1; 1 is off
    presence_penalty    subtracted from the logits of the answer's tokens, -2 to 2
    frequency_penalty   subtracted for each time that the answer has a token, -2 to 2
    logit_bias          added to the logits of tokens, by id
    allowed_token_ids   the only tokens that may be chosen; None: all
    banned_token_ids    tokens that may not be chosen
    structured_output   a form that the answer must have
    logprobs            log-probabilities of the answer's tokens and of so many of the most probable
                        beside each; None: none
    prompt_logprobs     the same of the prompt's tokens

    Log-probabilities are the target's own, before any of the above changes them. Raises
    `RequestError` naming the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    structured_output: StructuredOutput | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a token's place in the text changes its logit."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_law()
        self._check_limits()

    def _check_law(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", "must be from 0 to 100")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        _require(0 < self.typical_p <= 1, "typical_p", "must be above 0 and at most 1")
        _require(0 < self.repetition_penalty <= 100, "repetition_penalty", "must be above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(abs(getattr(self, name)) <= MAX_PENALTY, name, "must be from -2 to 2")
        biases = self.logit_bias.values()
        _require(
            all(abs(bias) <= MAX_BIAS for bias in biases), "logit_bias", "must be from -100 to 100"
        )
        _require(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")

    def _check_limits(self) -> None:
        most = self.max_tokens
        _require(most is None or most >= 1, "max_tokens", "must be at least 1")
        _require(self.min_tokens >= 0, "min_tokens", "must be 0 or more")
        _require(
            most is None or self.min_tokens <= most, "min_tokens", "must not exceed max_tokens"
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fits = value is None or 0 <= value <= MAX_LOG_PROBS
            _require(fits, name, f"must be from 0 to {MAX_LOG_PROBS}")
        _require(
            self.structured_output is None or not self.ignore_eos,
            "ignore_eos",
            "does not go with a structured output, which ends where its form is complete",
        )
        _require(
            self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "must be from 0 to 2**63 - 1"
        )
        _require(all(self.stop), "stop", "must not hold an empty text")

    def _check_types(self) -> None:
        for name in (
            *("temperature", "top_p", "min_p", "typical_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        ):
            _require(_is_number(getattr(self, name)), name, "must be a finite number")
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_whole(value), name, "must be a whole number")
        for name in ("top_k", "min_tokens"):
            _require(_is_whole(getattr(self, name)), name, "must be a whole number")
        listed = isinstance(self.stop, tuple) and all(isinstance(text, str) for text in self.stop)
        _require(listed, "stop", "must be a tuple of str")
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            listed = isinstance(value, tuple) and all(_is_whole(item) for item in value)
            optional = value is None and name == "allowed_token_ids"
            _require(optional or listed, name, "must be a tuple of int")
        pairs = self.logit_bias.items()
        biases = all(_is_whole(token) and _is_number(bias) for token, bias in pairs)
        _require(biases, "logit_bias", "must give finite numbers by token id")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise RequestError(field, message)
