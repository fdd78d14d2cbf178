"""Suffix counts of a text that may grow for ever, in bounded memory."""

from __future__ import annotations

from ...core.arrays import Int32
from .automaton import Automaton
from .counts import SuffixCounts


class RecentCounts:
    """Suffix counts of the latest tokens: of at most `max_tokens`, and of at least half as many.

    A suffix automaton cannot forget, so a second one begins half way, takes the place of the first
    when that is full, and what is older than it is gone. What is counted depends on the tokens
    alone, not on how they were cut in appends.
    """

    __slots__ = ("_half", "_max_depth", "_num_tokens", "_serving", "_younger")

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self._half = max_tokens // 2
        self._max_depth = max_depth
        self._num_tokens = 0
        self._serving = SuffixCounts(max_depth)
        self._younger: SuffixCounts | None = None

    @property
    def automaton(self) -> Automaton:
        """What the compiled loops read; another one after an append."""
        return self._serving.automaton

    @property
    def memory_bytes(self) -> int:
        """Bytes of both automata."""
        return sum(counts.memory_bytes for counts in self._both())

    def start_text(self) -> None:
        """Begin a new text: what is appended next does not follow what was before."""
        for counts in self._both():
            counts.start_text()

    def append(self, tokens: Int32) -> None:
        """Continue the text. `tokens` is int32 [n]."""
        while len(tokens):
            if self._num_tokens and self._num_tokens % self._half == 0:
                self._serving = self._younger or self._serving
                self._younger = SuffixCounts(self._max_depth)
            piece = tokens[: self._half - self._num_tokens % self._half]
            for counts in self._both():
                counts.append(piece)
            self._num_tokens += len(piece)
            tokens = tokens[len(piece) :]

    def check_integrity(self) -> None:
        """Assert what `SuffixCounts` does, and that no more tokens are kept than `max_tokens`."""
        for counts in self._both():
            counts.check_integrity()
        assert self._serving.num_tokens <= 2 * self._half

    def _both(self) -> tuple[SuffixCounts, ...]:
        return (self._serving,) if self._younger is None else (self._serving, self._younger)
