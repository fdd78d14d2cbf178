"""How often tokens came in a text, as penalties count them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy


class TokenCounts:
    """Distinct tokens of a text, those of the prompt first, and how often each is in the answer.

    times          by token
    num_in_prompt  so many of them are in the prompt
    """

    __slots__ = ("num_in_prompt", "times")

    def __init__(self, prompt: Iterable[int]) -> None:
        self.times = dict.fromkeys(prompt, 0)
        self.num_in_prompt = len(self.times)

    def append(self, tokens: Iterable[int]) -> None:
        """Count tokens of the answer."""
        for token in tokens:
            self.times[token] = self.times.get(token, 0) + 1

    def copy(self) -> TokenCounts:
        """The same counts, to go on from apart."""
        other = copy(self)
        other.times = self.times.copy()
        return other
