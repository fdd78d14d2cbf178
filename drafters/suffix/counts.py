"""Counts of every string in a growing text.

See docs/drafters.md, "Suffix decoding".
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Int32
from .automaton import (
    CONTEXT,
    CONTEXT_LEN,
    COUNT,
    LAST,
    LENGTH,
    LINK,
    NONE,
    NUM_EDGES,
    NUM_STATES,
    NUM_TOKENS,
    ROOT_STATE,
    SOURCE,
    TARGET,
    Automaton,
    empty_automaton,
    extend,
    fill_table,
    find_edge,
    row_of,
)

FIRST_CAPACITY = 64


class SuffixCounts:
    """The counts of a suffix tree of depth `max_depth`, kept in a suffix automaton.

    Takes at most 112 bytes a token, and twice that where the arrays have just grown.

    num_tokens  of all texts
    automaton   what the compiled loops read; another one after an append or `take`
    row         the same as a row of `extend_all`
    """

    __slots__ = ("_capacity", "_max_depth", "automaton", "num_tokens", "row")

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._capacity = FIRST_CAPACITY
        self.num_tokens = 0
        self.automaton: Automaton = empty_automaton(FIRST_CAPACITY)
        self.row = row_of(self.automaton)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.automaton)

    def start_text(self) -> None:
        """Begin a new text: what is appended next does not follow what was before."""
        self.automaton[3][[LAST, CONTEXT, CONTEXT_LEN]] = (ROOT_STATE, ROOT_STATE, 0)

    def take(self, count: int) -> tuple[int, ...]:
        """Count so many tokens, which the caller appends now to the automaton of this row."""
        self.num_tokens += count
        if self.num_tokens > self._capacity:
            self._grow()
        return self.row

    def append(self, tokens: Int32) -> None:
        """Continue the text. `tokens` is int32 [n]."""
        self.take(len(tokens))
        # The loops are compiled for arrays that may be written, and would be again for others.
        extend(self.automaton, np.array(tokens, dtype=np.int32), self._max_depth)

    def check_integrity(self) -> None:
        """Assert that states, edges, table and counts agree with each other."""
        states, edges, table, cursor = self.automaton
        num_states, num_edges = int(cursor[NUM_STATES]), int(cursor[NUM_EDGES])
        states, edges = states[:num_states], edges[:num_edges]
        assert np.count_nonzero(table != NONE) == num_edges
        for edge, (source, token, _, _) in enumerate(edges.tolist()):
            assert find_edge(self.automaton, source, token) == edge
        lengths, links, counts = states[:, LENGTH], states[1:, LINK], states[:, COUNT]
        sources, targets = edges[:, SOURCE], edges[:, TARGET]
        assert np.all(lengths[links] < lengths[1:])
        assert np.all(lengths[sources] < lengths[targets])
        assert lengths[cursor[CONTEXT]] >= cursor[CONTEXT_LEN]
        # Each place of a string has at most one token after it, and at most one before it. A
        # state is counted where its shortest string is not too long.
        shortest = np.append(0, lengths[links] + 1)
        is_counted = shortest[sources] < self._max_depth
        after = np.bincount(sources[is_counted], counts[targets[is_counted]], num_states)
        is_counted = shortest[1:] <= self._max_depth
        before = np.bincount(links[is_counted], counts[1:][is_counted], num_states)
        assert after[ROOT_STATE] == before[ROOT_STATE] == cursor[NUM_TOKENS] == self.num_tokens
        assert np.all(np.maximum(after, before)[1:] <= counts[1:])

    def _grow(self) -> None:
        capacity = self._capacity
        while capacity < self.num_tokens:
            capacity *= 2
        old_states, old_edges, _, cursor = self.automaton
        states, edges, table, _ = empty_automaton(capacity)
        num_edges = int(cursor[NUM_EDGES])
        states[: cursor[NUM_STATES]] = old_states[: cursor[NUM_STATES]]
        edges[:num_edges] = old_edges[:num_edges]
        fill_table(edges, num_edges, table)
        self._capacity = capacity
        self.automaton = (states, edges, table, cursor)
        self.row = row_of(self.automaton)


def grown_counts() -> SuffixCounts:
    """Counts of some text that has outgrown its first arrays: all their loops have run."""
    counts = SuffixCounts(max_depth=2)
    counts.append(np.zeros(FIRST_CAPACITY + 1, dtype=np.int32))
    return counts


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
    def row(self) -> tuple[int, ...]:
        """The same as a row of `extend_all`."""
        return self._serving.row

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

    def take(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Count so many tokens, which the caller appends now to the automata of these rows.

        None, and nothing is counted, where an automaton begins or ends among them: `append` then.
        """
        place = self._num_tokens % self._half
        if place + count > self._half or (self._num_tokens and not place):
            return ()
        self._num_tokens += count
        younger = self._younger
        row = self._serving.take(count)
        return (row,) if younger is None else (row, younger.take(count))

    def check_integrity(self) -> None:
        """Assert what `SuffixCounts` does, and that no more tokens are kept than `max_tokens`."""
        for counts in self._both():
            counts.check_integrity()
        assert self._serving.num_tokens <= 2 * self._half

    def _both(self) -> tuple[SuffixCounts, ...]:
        return (self._serving,) if self._younger is None else (self._serving, self._younger)
