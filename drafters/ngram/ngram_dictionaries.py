"""SPECTRA-CORE's forward dictionary of n-grams (Le et al., ACL 2025, section 4.2.1).

It leads from a token to the continuations seen after it. Lookahead's pool is one; SPECTRA keeps its
own in arrays (`spectra/tables.py`). See docs/drafters.md, "SPECTRA".
"""

from __future__ import annotations

from collections.abc import Iterator

Ngram = tuple[int, ...]

# About what an n-gram takes in a dictionary: its slot there, its tuple, and its tokens.
NGRAM_BYTES = 120
# About what a dictionary takes in another one.
INNER_BYTES = 260


class ForwardDictionary:
    """Continuations of each token, of which the latest `capacity` are kept, for `max_keys` tokens.

    Of a continuation and its prefix only the longer one is kept: in a trie of guesses it says both.
    """

    __slots__ = ("_by_token", "_capacity", "_max_keys", "_num_kept")

    def __init__(self, capacity: int, max_keys: int) -> None:
        self._capacity = capacity
        self._max_keys = max_keys
        self._num_kept = 0
        # Dicts used as ordered sets: the latest last, in both levels.
        self._by_token: dict[int, dict[Ngram, None]] = {}

    def __contains__(self, token: int) -> bool:
        return token in self._by_token

    @property
    def memory_bytes(self) -> int:
        """About the bytes of keys and continuations."""
        return len(self._by_token) * INNER_BYTES + self._num_kept * NGRAM_BYTES

    def add(self, token: int, continuation: Ngram) -> None:
        """Make it the latest continuation of `token`."""
        kept = self._by_token.pop(token, None)
        if kept is None:
            kept = {}
            if len(self._by_token) == self._max_keys:
                self._num_kept -= len(self._by_token.pop(next(iter(self._by_token))))
        self._by_token[token] = kept
        self._num_kept -= len(kept)
        prefix = continuation[:-1]
        if prefix in kept:
            # Nothing kept is a prefix of another, so nothing else begins with this one.
            del kept[prefix]
        else:
            known = _beginning_with(continuation, kept)
            if known is not None:
                continuation = known
                del kept[known]
            elif len(kept) == self._capacity:
                del kept[next(iter(kept))]
        kept[continuation] = None
        self._num_kept += len(kept)

    def continuations(self, token: int) -> Iterator[Ngram]:
        """The continuations of `token`, the latest first."""
        return reversed(self._by_token.get(token, {}))


def _beginning_with(prefix: Ngram, kept: dict[Ngram, None]) -> Ngram | None:
    """The latest of `kept` that begins with `prefix`; a plain loop, since prompts are long."""
    if prefix in kept:
        return prefix
    length = len(prefix)
    for known in reversed(kept):
        if known[:length] == prefix:
            return known
    return None
