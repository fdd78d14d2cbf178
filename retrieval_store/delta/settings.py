"""The model that learned texts are for, and how much of them is kept, for how long.

See docs/retrieval.md, "Learning".
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Protocol

from ...core.arrays import Int32
from ...core.errors import ConfigError


class Tagged(Protocol):
    """Names texts of one model in paths and keys."""

    @property
    def tag(self) -> str:
        """16 hexadecimal digits."""
        ...


@dataclass(frozen=True, slots=True)
class Tag:
    """Implements `Tagged` for a tag without its fingerprint."""

    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The model that a corpus is built for; see `models/text/fingerprint.py`."""

    tokenizer_hash: str
    model_hash: str
    vocab_size: int

    @property
    def tag(self) -> str:
        """16 hexadecimal digits, safe in paths and keys; texts of other models have others."""
        named = f"{self.tokenizer_hash}\0{self.model_hash}\0{self.vocab_size}"
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    def takes(self, tokens: Int32) -> bool:
        """Whether all tokens are ids of the vocabulary."""
        return not len(tokens) or (tokens.min() >= 0 and tokens.max() < self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """Bounds of what one namespace learns; raises `ConfigError` naming the field.

    log_entries    most events of a log
    log_seconds    age in seconds at which events leave the log
    delta_tokens   most tokens of texts that are not folded yet, in memory
    fold_tokens    tokens in the log at which it is folded
    fold_entries   events in the log at which it is folded
    folded_tokens  most tokens of folded texts
    half_life      seconds in which a weight halves
    """

    log_entries: int = 4096
    log_seconds: float = 86_400.0
    delta_tokens: int = 131_072
    fold_tokens: int = 32_768
    fold_entries: int = 256
    folded_tokens: int = 262_144
    half_life: float = 86_400.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(field.name, f"must be above 0, got {getattr(self, field.name)}")
