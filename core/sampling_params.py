"""A user's sampling parameters, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import RequestError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    max_tokens      most tokens to generate; None: up to the model's context
    temperature     0 is greedy
    top_k           keep the k most probable tokens; 0 is off
    top_p           keep the smallest set of tokens with at least this probability; 1 is off
    min_p           drop tokens less probable than this times the most probable; 0 is off
    seed            of the sampling noise: one seed, one text, with any drafters; None: random
    stop            texts that end the answer; they are not part of it
    stop_token_ids  tokens that end the answer; they are part of `token_ids`, not of the text
    ignore_eos      go on after the model's end-of-sequence token

    Raises `RequestError` naming the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        _require(
            self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1"
        )
        _require(0 <= self.temperature <= 100, "temperature", "must be from 0 to 100")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        _require(
            self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "must be from 0 to 2**63 - 1"
        )
        _require(all(self.stop), "stop", "must not hold an empty text")

    def _check_types(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(number and math.isfinite(value), name, "must be a finite number")
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            optional = value is None and name != "top_k"
            whole = isinstance(value, int) and not isinstance(value, bool)
            _require(optional or whole, name, "must be a whole number")
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            listed = isinstance(value, tuple) and all(isinstance(item, kind) for item in value)
            _require(listed, name, f"must be a tuple of {kind.__name__}")


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise RequestError(field, message)
