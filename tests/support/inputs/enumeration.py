"""Every outcome of a random procedure with its probability: no sampling, so errors are rounding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TypeVar

import numpy as np
from draftline.core.arrays import Float64

T = TypeVar("T")
Text = tuple[int, ...]
# The distribution of the next token after every text that is long enough to matter.
Distributions = dict[Text, Float64]


class Branch:
    """A `Rng` that follows a script of choices, and then always takes the first one."""

    def __init__(self, script: Sequence[int]) -> None:
        self.weight = 1.0
        self.taken: list[tuple[int, int]] = []
        self._script = script

    def accepts(self, probability: float) -> bool:
        """Take the next choice: true with this probability."""
        assert -1e-12 <= probability <= 1 + 1e-12, probability
        return self._choose([(True, probability), (False, 1.0 - probability)])

    def draw(self, distribution: Float64) -> int:
        """A draw."""
        assert abs(distribution.sum() - 1) < 1e-9, distribution
        return self._choose([(token, float(weight)) for token, weight in enumerate(distribution)])

    def _choose(self, options: list[tuple[T, float]]) -> T:
        possible = [(value, weight) for value, weight in options if weight > 0]
        place = len(self.taken)
        choice = self._script[place] if place < len(self._script) else 0
        self.taken.append((choice, len(possible)))
        value, weight = possible[choice]
        self.weight *= weight
        return value


def outcomes(run: Callable[[Branch], T]) -> Iterator[tuple[float, T]]:
    """What `run` gives on every branch of its choices, and how likely each is."""
    script: list[int] | None = []
    while script is not None:
        branch = Branch(script)
        result = run(branch)
        yield branch.weight, result
        script = _next(branch.taken)


def _next(taken: Sequence[tuple[int, int]]) -> list[int] | None:
    for place in range(len(taken) - 1, -1, -1):
        choice, count = taken[place]
        if choice + 1 < count:
            return [*(earlier for earlier, _ in taken[:place]), choice + 1]
    return None


def random_distributions(
    rng: np.random.Generator, vocab: int, length: int, alpha: float = 0.7
) -> Distributions:
    """A distribution after every text of up to `length` tokens."""
    return {
        text: rng.dirichlet(np.full(vocab, alpha))
        for size in range(length + 1)
        for text in product(range(vocab), repeat=size)
    }


def deviation(run: Callable[[Branch], Text], distributions: Distributions, length: int) -> float:
    """Total variation between the texts of `run` and those of the target, to `length` tokens.

    A shorter text is continued by the target.
    """
    vocab = len(distributions[()])
    found: dict[Text, float] = defaultdict(float)
    for weight, text in outcomes(run):
        for rest in product(range(vocab), repeat=max(0, length - len(text))):
            whole = (*text, *rest)[:length]
            found[whole] += weight * _likelihood(distributions, whole, min(len(text), length))
    wanted = {
        text: _likelihood(distributions, text, 0) for text in product(range(vocab), repeat=length)
    }
    return 0.5 * sum(abs(found[text] - likelihood) for text, likelihood in wanted.items())


def _likelihood(distributions: Distributions, text: Text, start: int) -> float:
    return float(
        np.prod([distributions[text[:place]][text[place]] for place in range(start, len(text))])
    )
