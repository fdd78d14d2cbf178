"""Which documents of a corpus are stored, for a number of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....core.arrays import Float64, Int64
from ....retrieval_store.corpus.coverage import by_coverage


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
    covers most (n-grams weighted by 1 over the document's perplexity, or by the probability of
    their last token), and random draws, all of as many tokens.
    """
    sizes = [len(document.ids) for document in documents]
    perplexities = [document.perplexity for document in documents]
    order = sorted(range(len(documents)), key=lambda index: perplexities[index])
    yield Choice("whole", sum(sizes), 0, tuple(order))
    ids = [document.ids for document in documents]
    ranks = {
        "lowest": order,
        "highest": order[::-1],
        "coverage": list(by_coverage(ids, [1 / perplexity for perplexity in perplexities])),
        "token_coverage": list(by_coverage(ids, [document.probs for document in documents])),
    }
    for share in shares:
        budget = round(share * sum(sizes))
        for kind, ranked in ranks.items():
            yield Choice(kind, budget, 0, _within(ranked, sizes, budget))
        for draw in range(draws):
            drawn = random.Random(draw).sample(order, len(order))
            yield Choice("random", budget, draw, _within(drawn, sizes, budget))


def _within(order: Iterable[int], sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    """The first ones, until one does not fit."""
    chosen, left = [], budget
    for index in order:
        if sizes[index] > left:
            break
        chosen.append(index)
        left -= sizes[index]
    return tuple(chosen)
