"""Fingerprints of the model that a text of token ids is for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from ...core.arrays import Int32


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
