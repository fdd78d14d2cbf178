"""Which documents of a corpus are stored, for a number of tokens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....core.arrays import Float64, Int64

# Tokens of an n-gram whose coverage counts.
NGRAM = 4


@dataclass(frozen=True, slots=True)
class Scored:
    """A document as the target judges it.

    ids    int64 [n]
    probs  float64 [n]  of each token after those before it; the first one's is 0
    """

    ids: Int64
    probs: Float64

    @property
    def perplexity(self) -> float:
        """Of all tokens but the first."""
        return float(np.exp(-np.log(np.maximum(self.probs[1:], 1e-30)).mean()))


@dataclass(frozen=True, slots=True)
class Choice:
    """The documents of one store; `indices` into those that were scored, `budget` of its tokens."""

    kind: str
    budget: int
    draw: int
    indices: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique, and safe as a folder."""
        return f"{self.kind}-{self.budget}-{self.draw}"


def choices(documents: Sequence[Scored], shares: Sequence[float], draws: int) -> Iterator[Choice]:
    """The whole corpus; for each share of its tokens the lowest perplexities, the highest, what
    covers most, and random draws, all of as many tokens.
    """
    sizes = [len(document.ids) for document in documents]
    perplexities = [document.perplexity for document in documents]
    order = sorted(range(len(documents)), key=lambda index: perplexities[index])
    yield Choice("whole", sum(sizes), 0, tuple(order))
    covering = list(by_coverage(documents, round(max(shares) * sum(sizes))))
    for share in shares:
        budget = round(share * sum(sizes))
        for kind, ranked in (
            ("lowest", order), ("highest", order[::-1]), ("coverage", covering),
        ):  # fmt: skip
            yield Choice(kind, budget, 0, _within(ranked, sizes, budget))
        for draw in range(draws):
            drawn = random.Random(draw).sample(order, len(order))
            yield Choice("random", budget, draw, _within(drawn, sizes, budget))


def by_coverage(documents: Sequence[Scored], budget: int) -> Iterator[int]:
    """Documents in the order of what each adds for its tokens, until `budget` tokens are there.

    It adds the probabilities, as the target gives them, of the last tokens of n-grams that no
    document before it has: what the target would say, and say nowhere else. What a document adds
    only falls, so the greedy choice looks again at the best alone (Minoux 1978), and is within
    1 - 1/e of the best choice there is (Nemhauser, Wolsey and Fisher 1978).
    """
    grams, probs, num_grams = _grams(documents)
    is_new = np.ones(num_grams, dtype=np.bool_)

    def gain(index: int) -> float:
        return float((probs[index] * is_new[grams[index]]).sum()) / len(documents[index].ids)

    queue = [(-gain(index), index) for index in range(len(documents))]
    heapq.heapify(queue)
    left = budget
    while queue and left > 0:
        _, index = heapq.heappop(queue)
        now = -gain(index)
        if queue and now > queue[0][0]:
            heapq.heappush(queue, (now, index))
            continue
        is_new[grams[index]] = False
        left -= len(documents[index].ids)
        yield index


def _grams(documents: Sequence[Scored]) -> tuple[list[Int64], list[Float64], int]:
    """The n-grams of each document, once each, as numbers from 0; the probability of each one's
    last token there; and how many there are in all.
    """
    rows = [
        np.lib.stride_tricks.sliding_window_view(document.ids, NGRAM)
        for document in documents
        if len(document.ids) >= NGRAM
    ]
    _, numbers = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    grams: list[Int64] = []
    probs: list[Float64] = []
    start = 0
    for document in documents:
        count = max(len(document.ids) - NGRAM + 1, 0)
        own, first = np.unique(numbers[start : start + count], return_index=True)
        grams.append(own)
        probs.append(document.probs[NGRAM - 1 :][first])
        start += count
    return grams, probs, int(numbers.max()) + 1


def _within(order: Iterable[int], sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    """The first ones, until one does not fit."""
    chosen, left = [], budget
    for index in order:
        if sizes[index] > left:
            break
        chosen.append(index)
        left -= sizes[index]
    return tuple(chosen)
