"""A corpus' documents, from their texts to their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...core.arrays import Bool, Int32, Int64


class Span(NamedTuple):
    """Characters `start` to `stop` of a text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `name` is its source, such as `notes.jsonl:12`.

    answers  spans that are scored by the target, ascending; None: the whole text
    """

    name: str
    text: str
    answers: tuple[Span, ...] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; the role is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns that a model's chat template makes a document of."""

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A document that could not be read, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """A document's tokens.

    ids        int32 [n]
    is_scored  bool [n]  tokens whose probability counts in the document's perplexity; None: all
    """

    ids: Int32
    is_scored: Bool | None = None

    def num_scored(self, start: int, stop: int) -> int:
        """Number of scored tokens from `start` to `stop`."""
        if self.is_scored is None:
            return max(0, stop - start)
        return int(np.count_nonzero(self.is_scored[start:stop]))

    def scored_places(self, start: int, stop: int) -> Int64:
        """Places of the scored tokens from `start` to `stop`, ascending: int64 [m]."""
        if self.is_scored is None:
            return np.arange(start, stop, dtype=np.int64)
        return start + np.flatnonzero(self.is_scored[start:stop])
