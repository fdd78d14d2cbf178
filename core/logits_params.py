"""The part of a user's parameters that drafters need as well, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import MAX_INT32, are_token_ids, is_number, is_token_id, is_whole, require

MAX_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsParams:
    """What changes the distribution of tokens, beside temperature and structured output.

    The fields are those of `SamplingParams`, which explains them; the defaults change nothing.
    Raises `RequestError` naming the field.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's place in the text changes its logit."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_penalties()
        self._check_tokens()

    def _check_filters(self) -> None:
        for name in ("top_p", "min_p", "typical_p"):
            require(is_number(getattr(self, name)), name, "must be a finite number")
        for name in ("top_k", "min_tokens"):
            value = getattr(self, name)
            require(is_whole(value), name, "must be a whole number")
            # Steps and messages carry it in 32 bits.
            require(value <= MAX_INT32, name, "must be below 2**31")
        require(self.top_k >= 0, "top_k", "must be 0 (off) or more")
        require(self.min_tokens >= 0, "min_tokens", "must be 0 or more")
        require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        require(0 < self.typical_p <= 1, "typical_p", "must be above 0 and at most 1")

    def _check_penalties(self) -> None:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            require(is_number(getattr(self, name)), name, "must be a finite number")
        repetition = self.repetition_penalty
        require(0 < repetition <= 100, "repetition_penalty", "must be above 0 and at most 100")
        for name in ("presence_penalty", "frequency_penalty"):
            require(abs(getattr(self, name)) <= MAX_PENALTY, name, "must be from -2 to 2")

    def _check_tokens(self) -> None:
        allowed, banned = self.allowed_token_ids, self.banned_token_ids
        require(are_token_ids(banned), "banned_token_ids", "must be a tuple of token ids")
        listed = allowed is None or are_token_ids(allowed)
        require(listed, "allowed_token_ids", "must be a tuple of token ids")
        require(allowed != (), "allowed_token_ids", "must not be empty")
        pairs = self.logit_bias.items()
        numbers = all(is_token_id(token) and is_number(bias) for token, bias in pairs)
        require(numbers, "logit_bias", "must give finite numbers by token id")
        limited = all(abs(bias) <= MAX_BIAS for _, bias in pairs)
        require(limited, "logit_bias", "must be from -100 to 100")


UNSHAPED = LogitsParams()
