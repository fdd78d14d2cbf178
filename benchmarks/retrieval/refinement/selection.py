"""Which documents of a corpus are stored, for a number of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ....retrieval_store.corpus.documents import TokenizedDocument
from ....retrieval_store.corpus.refine import Score
from ....retrieval_store.corpus.selection import LOWEST, SELECTIONS, ranking


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


def choices(
    documents: Sequence[TokenizedDocument],
    scores: Sequence[Score],
    shares: Sequence[float],
    draws: int,
) -> Iterator[Choice]:
    """The whole corpus; for each share of its tokens what each `--select` takes first, the highest
    perplexities, and random draws, all of as many tokens.

    scores  of the documents, with `token_probs`
    """
    sizes = [len(document.ids) for document in documents]
    ranks = {select: list(ranking(documents, scores, select)) for select in SELECTIONS}
    order = ranks[LOWEST]
    ranks["highest"] = order[::-1]
    yield Choice("whole", sum(sizes), 0, tuple(order))
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
