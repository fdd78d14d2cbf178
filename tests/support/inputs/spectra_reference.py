"""SPECTRA's text dictionaries in plain Python: what the compiled ones must say, node by node."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from draftline.core.proposals import Proposal
from draftline.core.tree.merge import ProposalTrie
from draftline.drafters.ngram.lookahead import ForwardDictionary, Ngram
from draftline.drafters.spectra.drafter import SpectraOptions


class BackwardDictionary:
    """The token that followed each sequence last, for the latest `max_keys` sequences."""

    __slots__ = ("_max_keys", "_next")

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._next: dict[Ngram, int] = {}

    def add(self, sequence: Ngram, token: int) -> None:
        """Note that `token` followed `sequence`, in place of the token that did before."""
        if self._next.pop(sequence, None) is None and len(self._next) == self._max_keys:
            del self._next[next(iter(self._next))]
        self._next[sequence] = token

    def guess(self, context: Sequence[int], key_len: int, guess_len: int) -> list[int]:
        """Grow a guess below `context`, each token by the longest known suffix up to `key_len`."""
        tail = tuple(context[-key_len:])
        guess: list[int] = []
        while len(guess) < guess_len:
            for first in range(len(tail)):
                token = self._next.get(tail[first:])
                if token is not None:
                    break
            else:
                break
            guess.append(token)
            tail = (*tail, token)[-key_len:]
        return guess


class KeptWhole:
    """The latest `capacity` continuations of the latest tokens, prefixes of others among them."""

    def __init__(self, capacity: int, max_keys: int) -> None:
        self._capacity = capacity
        self._max_keys = max_keys
        self._kept: dict[int, list[Ngram]] = {}

    def __contains__(self, token: int) -> bool:
        return token in self._kept

    def add(self, token: int, continuation: Ngram) -> None:
        if token not in self._kept and len(self._kept) == self._max_keys:
            del self._kept[next(iter(self._kept))]
        kept = [one for one in self._kept.pop(token, ()) if one != continuation]
        self._kept[token] = [*kept, continuation][-self._capacity :]

    def continuations(self, token: int) -> list[Ngram]:
        return self._kept.get(token, [])[::-1]


class PlainSpectra:
    """One request without a pool of its own: completed n-grams are given to `learn_ngrams`."""

    def __init__(self, options: SpectraOptions) -> None:
        self._options = options
        kind = KeptWhole if options.keep_prefixes else ForwardDictionary
        self._forward = kind(options.capacity, options.max_keys)
        self._backward = BackwardDictionary(options.max_keys)
        self._tail: deque[int] = deque(maxlen=options.ngram)

    def propose(self, max_nodes: int) -> Proposal:
        trie = ProposalTrie(max_nodes)
        trie.add_all(islice(self._guesses(), self._options.max_guesses))
        return trie.proposal("spectra")

    def _guesses(self) -> Iterator[Sequence[int]]:
        parts = (self._forward_guesses, self._backward_guess)
        for part in parts if self._options.forward_first else reversed(parts):
            yield from part()

    def _backward_guess(self) -> Iterator[Sequence[int]]:
        options = self._options
        if options.backward:
            key_len = options.ngram - 1
            guess = self._backward.guess(tuple(self._tail), key_len, options.guess_len or key_len)
            if guess:
                yield guess

    def _forward_guesses(self) -> Iterator[Sequence[int]]:
        if self._options.forward:
            yield from self._forward.continuations(self._tail[-1])

    def knows(self, token: int) -> bool:
        return token in self._forward

    def learn_ngrams(self, ngrams: Sequence[Ngram]) -> None:
        for ngram in ngrams:
            for start in range(len(ngram) - 1) if self._options.all_offsets else (0,):
                for length in self._lengths(len(ngram) - start):
                    self._learn(ngram[start : start + length])

    def extend(self, tokens: Sequence[int], *, learn: bool) -> None:
        for token in tokens:
            self._tail.append(token)
            if learn:
                tail = tuple(self._tail)
                for length in self._lengths(len(tail)):
                    self._learn(tail[-length:])

    def _lengths(self, longest: int) -> range:
        return range(2 if self._options.sub_ngrams else self._options.ngram, longest + 1)

    def _learn(self, ngram: Ngram) -> None:
        self._forward.add(ngram[0], ngram[1:])
        self._backward.add(ngram[:-1], ngram[-1])
