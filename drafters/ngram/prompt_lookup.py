"""Prompt lookup: what followed the last tokens when they stood in the text before.

Saxena 2023, "Prompt Lookup Decoding", with the most recent match first, as vLLM does.
See docs/drafters.md, "Prompt lookup".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.arrays import ROOT, Float32, Int32, Int64
from ...core.compiled import address_of, compiled, int32_at, int32_rows_at, int64_at
from ...core.errors import ConfigError
from ...core.proposals import DraftRequest
from ...core.tree.proposal_batch import ProposalBatch
from ..open_requests import AssumedTokens, BatchedDrafter
from ..option_checks import require_whole

# The index of a text is four arrays, which all requests' calls take by their addresses
# (`core/compiled.py`); one column of a row each, and their sizes:
# text      int32 [capacity]           the tokens
# previous  int32 [lengths, capacity]  of the n-gram of each length that ends at a place: where it
#                                      ended before; NO_MATCH if nowhere
# table     int32 [lengths, slots]     by a hash of an n-gram: where it ended last; a power of two
# cursor    int64 [1 + lengths]        tokens so far; slots that are taken, of each length
# Lengths stand in falling order. The text's own suffix is the latest occurrence of its n-gram, so
# matches are found by following `previous` from the end, without hashing.
Index = tuple[Int32, Int32, Int32, Int64]

NO_MATCH = -1
# Columns of a row.
TEXT, PREVIOUS, TABLE, CURSOR, CAPACITY, NUM_SLOTS, NUM_LENGTHS, MAX_NGRAM = range(8)
# In a run of one token every position matches; more than a few of them add nothing.
MATCHES_TRIED_PER_LENGTH = 8
FACTOR = 0x1E3779B97F4A7C15
# Of a text's arrays when it opens, beyond its tokens.
FIRST_ROOM = 64


@compiled
def index_at(rows: Int64, place: int) -> Index:
    """The arrays that a row names."""
    row = rows[place]
    return (
        int32_at(row[TEXT], row[CAPACITY]),
        int32_rows_at(row[PREVIOUS], row[NUM_LENGTHS], row[CAPACITY]),
        int32_rows_at(row[TABLE], row[NUM_LENGTHS], row[NUM_SLOTS]),
        int64_at(row[CURSOR], 1 + row[NUM_LENGTHS]),
    )


@compiled
def extend_all(rows: Int64, tokens: Int32, ends: Int64) -> None:
    """Append tokens to the texts, those of text i up to `ends[i]`. Needs room for them."""
    first = 0
    for place in range(len(rows)):
        index = index_at(rows, place)
        for token in tokens[first : ends[place]]:
            _append(index, token, rows[place, MAX_NGRAM])
        first = ends[place]


@compiled
def _append(index: Index, token: int, max_ngram: int) -> None:
    text, previous, table, cursor = index
    end = cursor[0]
    text[end] = token
    cursor[0] += 1
    for row in range(len(previous)):
        length = max_ngram - row
        previous[row, end] = NO_MATCH
        if end + 1 >= length:
            slot = _slot(text, table[row], text, end, length)
            previous[row, end] = table[row, slot]
            cursor[1 + row] += table[row, slot] == NO_MATCH
            table[row, slot] = end


@compiled
def _slot(text: Int32, table: Int32, source: Int32, end: int, length: int) -> int:
    """Where the n-gram that ends at `end` of `source` stands in the text's table, or may be put."""
    mixed = np.int64(0)
    for place in range(end + 1 - length, end + 1):
        mixed = (mixed ^ np.int64(source[place])) * FACTOR
        mixed ^= mixed >> 29
    slot = mixed & (len(table) - 1)
    while table[slot] != NO_MATCH:
        other = table[slot]
        index = 0
        while index < length and text[other - index] == source[end - index]:
            index += 1
        if index == length:
            break
        slot = (slot + 1) & (len(table) - 1)
    return int(slot)


@compiled
def refill(index: Index, oldest: int, max_ngram: int) -> None:
    """Enter the latest end of every n-gram that ends at `oldest` or later in the empty table."""
    text, previous, table, cursor = index
    for row in range(len(previous)):
        length = max_ngram - row
        cursor[1 + row] = 0
        for end in range(max(oldest, length - 1), cursor[0]):
            slot = _slot(text, table[row], text, end, length)
            cursor[1 + row] += table[row, slot] == NO_MATCH
            table[row, slot] = end


@compiled
def propose_all(
    rows: Int64,
    max_nodes: Int64,
    assumed: Int32,
    assumed_ends: Int64,
    num_tokens: int,
    num_matches: int,
    window: int,
) -> tuple[Int32, Int32, Float32, Int64]:
    """Tokens, parents, log-probabilities and ends, as in `ProposalBatch`, of a tree for each text.

    It holds what followed the suffix of the text and of what is assumed to follow it: longest
    suffix first, then latest first. Of each match `num_tokens` tokens, until `max_nodes[i]` nodes
    or `num_matches` different continuations are there. Only the text is searched, its latest
    `window` tokens.

    assumed  one text's tokens behind the other's, those of text i up to `assumed_ends[i]`
    """
    tokens = np.empty(max_nodes.sum(), dtype=np.int32)
    parents = np.empty(len(tokens), dtype=np.int32)
    ends = np.empty(len(rows), dtype=np.int64)
    first, first_assumed = 0, 0
    for place in range(len(rows)):
        index, most = index_at(rows, place), max_nodes[place]
        nodes = (tokens[first : first + most], parents[first : first + most])
        own = assumed[first_assumed : assumed_ends[place]]
        limits = (num_tokens, num_matches, window)
        first += _propose(index, nodes, own, rows[place, MAX_NGRAM], limits)
        ends[place], first_assumed = first, assumed_ends[place]
    return tokens[:first], parents[:first], np.zeros(first, dtype=np.float32), ends


@compiled
def _propose(
    index: Index,
    nodes: tuple[Int32, Int32],
    assumed: Int32,
    max_ngram: int,
    limits: tuple[int, int, int],
) -> int:
    text, previous, table, cursor = index
    num_tokens, num_matches, window = limits
    length, count, num_found = cursor[0], 0, 0
    oldest = max(0, length - window)
    # Of the text alone the index knows already where its n-grams stood before.
    tail = _tail(text[:length], assumed, max_ngram) if len(assumed) else assumed
    for row in range(len(previous)):
        if not len(assumed):
            end = previous[row, length - 1]
        elif max_ngram - row <= len(tail):
            end = table[row, _slot(text, table[row], tail, len(tail) - 1, max_ngram - row)]
        else:
            end = NO_MATCH
        for _ in range(MATCHES_TRIED_PER_LENGTH):
            if end < oldest:
                break
            before = count
            count = add_path(nodes, count, text[end + 1 : min(end + 1 + num_tokens, length)])
            num_found += count > before
            if count == len(nodes[0]) or num_found == num_matches:
                return count
            end = previous[row, end]
    return count


@compiled
def _tail(text: Int32, following: Int32, count: int) -> Int32:
    """The last tokens of a text and what follows it, at most so many."""
    num_before = min(len(text), max(0, count - len(following)))
    tail = np.empty(num_before + min(count, len(following)), dtype=np.int32)
    tail[:num_before] = text[len(text) - num_before :]
    tail[num_before:] = following[len(following) - (len(tail) - num_before) :]
    return tail


@compiled
def add_path(nodes: tuple[Int32, Int32], count: int, path: Int32) -> int:
    """Merge a path below the root in a forest of `count` nodes, as far as there is room.

    `nodes` are tokens and parents. Gives the new number of nodes.
    """
    tokens, parents = nodes
    parent = ROOT
    for token in path:
        node = parent + 1
        while node < count and (parents[node] != parent or tokens[node] != token):
            node += 1
        if node == count:
            if count == len(tokens):
                break
            tokens[node], parents[node] = token, parent
            count += 1
        parent = node
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupOptions:
    """Options of `PromptLookupDrafter`; raises `ConfigError` naming the option.

    max_ngram, min_ngram  lengths of the suffix that is looked up, longest first
    num_tokens            most tokens of one continuation
    num_matches           most different continuations; more than one form a tree
    window                how many of the latest tokens are searched
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = ("window",)

    max_ngram: int = 3
    min_ngram: int = 1
    num_tokens: int = 6
    num_matches: int = 3
    window: int = 32768

    def __post_init__(self) -> None:
        require_whole("min_ngram", self.min_ngram, 1)
        require_whole("max_ngram", self.max_ngram, 1, 64)
        require_whole("num_tokens", self.num_tokens, 1, 1024)
        require_whole("num_matches", self.num_matches, 1, 1024)
        require_whole("window", self.window, self.max_ngram)
        if self.min_ngram > self.max_ngram:
            raise ConfigError("min_ngram", f"must be at most max_ngram ({self.max_ngram})")


class _Text:
    """A text, and for every n-gram in it where it ended before (`Index`).

    row  of the arrays as the compiled loops take them; another one after `reserve`
    """

    __slots__ = ("_arrays", "_max_ngram", "_num_lengths", "_room", "_window", "committed_len",
                 "row")  # fmt: skip

    def __init__(self, options: PromptLookupOptions, num_tokens: int) -> None:
        self._window = options.window
        self._max_ngram = options.max_ngram
        self._num_lengths = options.max_ngram + 1 - options.min_ngram
        self.committed_len = 0
        self._arrays: Index = (
            *self._empty_text(num_tokens + FIRST_ROOM),
            self._empty_table(min(num_tokens, options.window) + FIRST_ROOM),
            np.zeros(1 + self._num_lengths, dtype=np.int64),
        )
        self._hold()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self._arrays)

    def reserve(self, count: int) -> None:
        """Make room for further tokens, which are committed now and appended later."""
        self.committed_len += count
        self._room -= count
        if self.committed_len > len(self._arrays[0]):
            self._grow(3 * self.committed_len // 2)
        if self._room < 0:
            self._refill()

    @property
    def _num_pending(self) -> int:
        """Tokens that are committed and not appended yet."""
        return self.committed_len - int(self._arrays[3][0])

    def _grow(self, capacity: int) -> None:
        """Go on in arrays for a text of so many tokens."""
        text, previous, table, cursor = self._arrays
        new_text, new_previous = self._empty_text(capacity)
        new_text[: len(text)] = text
        new_previous[:, : len(text)] = previous
        self._arrays = (new_text, new_previous, table, cursor)
        self._hold()

    def _refill(self) -> None:
        """Go on with a table that has room for what is pending.

        What lies before the window is never a match again, and is forgotten.
        """
        text, previous, _, cursor = self._arrays
        table = self._empty_table(min(self.committed_len, self._window) + self._num_pending)
        self._arrays = (text, previous, table, cursor)
        refill(self._arrays, int(cursor[0]) - self._window, self._max_ngram)
        self._hold()

    def _empty_text(self, capacity: int) -> tuple[Int32, Int32]:
        shape = self._num_lengths, capacity
        return np.empty(capacity, dtype=np.int32), np.empty(shape, dtype=np.int32)

    def _empty_table(self, entries: int) -> Int32:
        """For so many n-grams of each length."""
        slots = 1 << (4 * entries - 1).bit_length()
        return np.full((self._num_lengths, slots), NO_MATCH, dtype=np.int32)

    def _hold(self) -> None:
        text, _, table, cursor = self._arrays
        self._room = table.shape[1] // 2 - int(cursor[1:].max()) - self._num_pending
        addresses = map(address_of, self._arrays)
        self.row = (*addresses, len(text), table.shape[1], self._num_lengths, self._max_ngram)


class PromptLookupDrafter(BatchedDrafter[_Text]):
    """Proposes what followed earlier occurrences of the text's last tokens.

    A proposal costs microseconds at any context: the index is kept up as tokens are committed.
    """

    def __init__(
        self, name: str = "prompt_lookup", options: PromptLookupOptions | None = None
    ) -> None:
        super().__init__(name)
        self._options = options or PromptLookupOptions()
        # Compiles the loops, or reads them from disk, before a request waits for them.
        text = _Text(self._options, 1)
        # As many n-grams as its tables have to grow for.
        for tokens in np.split(np.arange(4 * FIRST_ROOM, dtype=np.int32), 4):
            text.reserve(len(tokens))
            self._extend_all([text], [tokens])
        self._propose_all([text], [1], AssumedTokens.none(1))

    def _state(self, request: DraftRequest) -> _Text:
        return _Text(self._options, len(request.token_ids))

    def _extend_all(self, states: Sequence[_Text], tokens: Sequence[Int32]) -> None:
        ends = np.array(list(map(len, tokens)), dtype=np.int64).cumsum()
        extend_all(_rows(states), np.concatenate(tokens), ends)

    def _propose_all(
        self, states: Sequence[_Text], max_nodes: Sequence[int], assumed: AssumedTokens
    ) -> ProposalBatch:
        options = self._options
        limits = np.array(max_nodes, dtype=np.int64)
        settings = options.num_tokens, options.num_matches, options.window
        return ProposalBatch(self._name, *propose_all(_rows(states), limits, *assumed, *settings))


def _rows(texts: Sequence[_Text]) -> Int64:
    return np.array([text.row for text in texts], dtype=np.int64)
