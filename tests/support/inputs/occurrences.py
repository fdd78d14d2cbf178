"""Counts of strings in texts by looking at every place: the reference of counted drafters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from draftline.core.proposals import Proposal

# Token, parent and probability of a node.
Row = tuple[int, int, Fraction]


@dataclass(frozen=True, slots=True)
class Following:
    """A token after a string: how often, and at which place last."""

    token: int
    count: int
    last_end: int


def ends_of(texts: Sequence[Sequence[int]], string: Sequence[int]) -> list[int]:
    """Where a string ends, among all tokens of the texts."""
    ends = []
    base = 0
    for text in texts:
        for start in range(len(text) - len(string) + 1):
            if list(text[start : start + len(string)]) == list(string):
                ends.append(base + start + len(string) - 1)
        base += len(text)
    return ends


def following(texts: Sequence[Sequence[int]], string: Sequence[int]) -> list[Following]:
    """What stands after a string: the most frequent token first, of equal ones the latest."""
    found = []
    for token in {token for text in texts for token in text}:
        ends = ends_of(texts, [*string, token])
        if ends:
            found.append(Following(token, len(ends), ends[-1]))
    return sorted(found, key=lambda one: (-one.count, -one.last_end))


def rows_of(proposal: Proposal) -> list[Row]:
    """The nodes, their probabilities as the fractions of small numbers that they came from."""
    probs = [Fraction(math.exp(value)).limit_denominator(99) for value in proposal.log_probs]
    return list(zip(proposal.tokens.tolist(), proposal.parents.tolist(), probs, strict=True))
