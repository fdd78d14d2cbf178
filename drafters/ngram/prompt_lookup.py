"""Prompt lookup: what followed the last tokens when they stood in the text before.

Saxena 2023, "Prompt Lookup Decoding", with the most recent match first, as vLLM does.
See docs/algorithms/drafters.md, "Prompt lookup".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ...core.errors import ConfigError
from ...core.proposals import Commit, DraftRequest, Proposal
from ...core.tree.merge import ProposalTrie
from ..open_requests import StatefulDrafter
from ..option_checks import require_whole
from .ngram_dictionaries import NGRAM_BYTES

# In a run of one token every position matches; more than a few of them add nothing.
MATCHES_TRIED_PER_LENGTH = 8
NO_MATCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupOptions:
    """Options of `PromptLookupDrafter`; raises `ConfigError` naming the option.

    max_ngram, min_ngram  lengths of the suffix that is looked up, longest first
    num_tokens            most tokens of one continuation
    num_matches           most different continuations; more than one form a tree
    window                how many of the latest tokens are searched
    """

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


class _OccurrenceIndex:
    """A text, and for every n-gram in it where it ended before.

    For each n-gram length: `last` maps an n-gram to the position of its latest end, `previous`
    leads from each end to the one before. The text's own suffix is the latest occurrence of its
    n-gram, so matches are found by following `previous` from the end, without hashing.
    """

    __slots__ = ("_tables", "_tokens", "_window")

    def __init__(self, options: PromptLookupOptions) -> None:
        self._tokens = array("i")
        self._window = options.window
        lengths = range(options.max_ngram, options.min_ngram - 1, -1)
        self._tables: list[tuple[int, dict[tuple[int, ...], int], array[int]]] = [
            (length, {}, array("i")) for length in lengths
        ]

    @property
    def committed_len(self) -> int:
        return len(self._tokens)

    @property
    def memory_bytes(self) -> int:
        tables = sum(
            len(last) * NGRAM_BYTES + len(previous) * previous.itemsize
            for _, last, previous in self._tables
        )
        return tables + len(self._tokens) * self._tokens.itemsize

    def extend(self, tokens: Iterable[int]) -> None:
        text = self._tokens
        for token in tokens:
            end = len(text)
            text.append(token)
            for length, last, previous in self._tables:
                start = end + 1 - length
                if start < 0:
                    previous.append(NO_MATCH)
                    continue
                ngram = tuple(text[start : end + 1])
                previous.append(last.get(ngram, NO_MATCH))
                last[ngram] = end
                self._forget(length, last, end - self._window)

    def _forget(self, length: int, last: dict[tuple[int, ...], int], end: int) -> None:
        start = end + 1 - length
        if start >= 0:
            ngram = tuple(self._tokens[start : end + 1])
            if last[ngram] == end:
                del last[ngram]

    def continuations(self, num_tokens: int) -> Iterator[array[int]]:
        """What followed the text's suffix: longest suffix first, then latest first.

        A continuation ends where the text ends, so it may be shorter than `num_tokens`.
        """
        for _, _, previous in self._tables:
            for end in islice(self._earlier_ends(previous), MATCHES_TRIED_PER_LENGTH):
                yield self._tokens[end + 1 : end + 1 + num_tokens]

    def _earlier_ends(self, previous: array[int]) -> Iterator[int]:
        oldest = max(0, len(previous) - self._window)
        end = previous[-1]
        while end >= oldest:
            yield end
            end = previous[end]


class PromptLookupDrafter(StatefulDrafter[_OccurrenceIndex]):
    """Proposes what followed earlier occurrences of the text's last tokens.

    A proposal costs microseconds at any context: the index is kept up as tokens are committed.
    """

    def __init__(
        self, name: str = "prompt_lookup", options: PromptLookupOptions | None = None
    ) -> None:
        super().__init__(name)
        self._options = options or PromptLookupOptions()

    def _state(self, request: DraftRequest) -> _OccurrenceIndex:
        index = _OccurrenceIndex(self._options)
        index.extend(request.token_ids.tolist())
        return index

    def _learn(self, state: _OccurrenceIndex, commit: Commit) -> None:
        state.extend(commit.tokens.tolist())

    def _propose(self, state: _OccurrenceIndex, max_nodes: int) -> Proposal:
        trie = ProposalTrie(max_nodes)
        num_new = 0
        for continuation in state.continuations(self._options.num_tokens):
            num_new += trie.add(continuation) > 0
            if trie.is_full or num_new == self._options.num_matches:
                break
        return trie.proposal(self._name)
