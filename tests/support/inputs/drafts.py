"""Drafts for tests of acceptance rules: trees whose candidates are drawn as a drafter would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from draftline.core.arrays import Float64
from support.inputs.enumeration import Distributions, Text
from support.inputs.plain_rules import Candidate, Rng, Rule

# Draws the candidates after a text: their tokens and declared distributions, in the order of their
# tests.
Draw = Callable[[Rng, Text], list[tuple[int, Float64 | None]]]


@dataclass(slots=True)
class Draft:
    """A tree as the rules take it. `texts` are those of its nodes, the root's is empty."""

    texts: list[Text] = field(default_factory=lambda: [()])
    children: list[list[Candidate]] = field(default_factory=lambda: [[]])

    def add(self, node: int, token: int, distribution: Float64 | None) -> int:
        """A candidate after `node`; equal tokens share a node."""
        known = [one.node for one in self.children[node + 1] if one.token == token]
        if known:
            found = known[0]
        else:
            found = len(self.texts) - 1
            self.texts.append((*self.texts[node + 1], token))
            self.children.append([])
        self.children[node + 1].append(Candidate(found, token, distribution))
        return found

    def verify(self, rule: Rule, distributions: Distributions, rng: Rng) -> Text:
        """What a rule commits."""
        # What comes after texts of full length is not looked at.
        beyond = np.eye(len(distributions[()]))[0]
        table = np.array([distributions.get(text, beyond) for text in self.texts])
        path, token = rule(table, self.children, rng)
        text = self.texts[path[-1] + 1] if path else ()
        return (*text, token)


def drawn_tree(rng: Rng, draws: Sequence[Draw]) -> Draft:
    """A tree whose level i is drawn by `draws[i]` after every node above it."""
    draft = Draft()
    level = [-1]
    for draw in draws:
        below = []
        for node in level:
            for token, distribution in draw(rng, draft.texts[node + 1]):
                child = draft.add(node, token, distribution)
                if child not in below:
                    below.append(child)
        level = below
    return draft


def iid(distributions: Distributions, count: int) -> Draw:
    """Independent draws."""
    return lambda rng, text: [
        (rng.draw(distributions[text]), distributions[text]) for _ in range(count)
    ]


def swor(distributions: Distributions, count: int) -> Draw:
    """Draws without replacement, each with the distribution that was left."""

    def draw(rng: Rng, text: Text) -> list[tuple[int, Float64 | None]]:
        distribution = distributions[text]
        found: list[tuple[int, Float64 | None]] = []
        for _ in range(min(count, np.count_nonzero(distribution))):
            token = rng.draw(distribution)
            found.append((token, distribution))
            distribution = without(distribution, token)
        return found

    return draw


def top(distributions: Distributions, count: int) -> Draw:
    """The most probable tokens, which are no draws."""
    return lambda _, text: [
        (int(token), None) for token in np.argsort(-distributions[text])[:count]
    ]


def both(*draws: Draw) -> Draw:
    """The candidates of several drafters, in their order."""
    return lambda rng, text: [one for draw in draws for one in draw(rng, text)]


def without(distribution: Float64, token: int) -> Float64:
    """`distribution` given that it is not this token."""
    left = distribution.copy()
    left[token] = 0.0
    return left / left.sum() if left.sum() > 0 else left
