"""Prompt lookup: what followed the last tokens when they stood in the text before.

Saxena 2023, "Prompt Lookup Decoding", with the most recent match first, as vLLM does.
See docs/drafters.md, "Prompt lookup".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import address_of
from ...core.errors import ConfigError
from ...core.proposals import DraftRequest
from ...core.tree.proposal_batch import ProposalBatch
from ..open_requests import AssumedTokens, BatchedDrafter
from ..option_checks import require_whole
from .ngram_index import NO_MATCH, Index, extend_all, propose_all, refill

# Of a text's arrays when it opens, beyond its tokens.
FIRST_ROOM = 64


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
    """A text, and for every n-gram in it where it ended before (`ngram_index.py`).

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
