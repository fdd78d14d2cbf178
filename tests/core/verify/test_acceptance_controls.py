"""Drafts and verifiers that break a condition of exactness fail the test that exact ones pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from draftline.core.arrays import Float64
from draftline.core.steps import VerificationResult
from support.inputs.drafts import Draft, Draw, drawn_tree, iid, swor, top
from support.inputs.enumeration import Branch, Distributions, Text, deviation, random_distributions
from support.inputs.plain_rules import Candidate, Rng, verify_rejection

# What an exact rule stays below is 1e-12; least deviation that a control must show.
SEEN = 1e-3
Candidates = list[tuple[int, Float64 | None]]


def top_with_distribution(q: Distributions, count: int) -> Draw:
    """The most probable tokens, as if they had been drawn."""
    return lambda rng, text: [(token, q[text]) for token, _ in top(q, count)(rng, text)]


def sorted_draws(draw: Draw, q: Distributions) -> Draw:
    """Draws, tested in the order of their probability."""
    return lambda rng, text: sorted(draw(rng, text), key=lambda one: -q[text][one[0]])


def sorted_swor(q: Distributions) -> Draw:
    """Draws without replacement, sorted, with the distributions that this order would have had."""

    def draw(rng: Rng, text: Text) -> Candidates:
        left = q[text].copy()
        found: Candidates = []
        tokens = [token for token, _ in swor(q, 2)(rng, text)]
        for token in sorted(tokens, key=lambda one: -q[text][one]):
            found.append((token, left / left.sum()))
            left = left.copy()
            left[token] = 0.0
        return found

    return draw


def unnormalised_swor(q: Distributions) -> Draw:
    return lambda rng, text: [(token, q[text]) for token, _ in swor(q, 2)(rng, text)]


def dropped_if_unlikely(q: Distributions) -> Draw:
    def draw(rng: Rng, text: Text) -> Candidates:
        token = rng.draw(q[text])
        return [(token, q[text])] if q[text][token] >= np.median(q[text]) else []

    return draw


def dropped_if_known(q: Distributions) -> Draw:
    """A one-hot candidate, and a draw that is left out where it is the same."""

    def draw(rng: Rng, text: Text) -> Candidates:
        (known,) = top(q, 1)(rng, text)
        token = rng.draw(q[text])
        return [known] if token == known[0] else [known, (token, q[text])]

    return draw


def before_its_cause(q: Distributions) -> Draw:
    def draw(rng: Rng, text: Text) -> Candidates:
        token = rng.draw(q[text])
        return [((token + 1) % len(q[text]), None), (token, q[text])]

    return draw


def skipped_repeat(first: Distributions, second: Distributions) -> Draw:
    def draw(rng: Rng, text: Text) -> Candidates:
        x, y = rng.draw(first[text]), rng.draw(second[text])
        return [(x, first[text])] if x == y else [(x, first[text]), (y, second[text])]

    return draw


ONE_STEP: dict[str, Callable[[Distributions, Distributions], Draw]] = {
    "top 2 with the drafter's distribution": lambda q, _: top_with_distribution(q, 2),
    "argmax with the drafter's distribution": lambda q, _: top_with_distribution(q, 1),
    "draws without replacement, sorted": lambda q, _: sorted_swor(q),
    "independent draws, sorted": lambda q, _: sorted_draws(iid(q, 2), q),
    "an unlikely draw is dropped": lambda q, _: dropped_if_unlikely(q),
    "a draw equal to a one-hot is dropped": lambda q, _: dropped_if_known(q),
    "a function of a draw comes before it": lambda q, _: before_its_cause(q),
    "draws without replacement, full distribution": lambda q, _: unnormalised_swor(q),
    "a repeat of two drafters is skipped": skipped_repeat,
}


def worst(
    length: int,
    run: Callable[[Distributions, Distributions, Distributions], Callable[[Branch], Text]],
) -> float:
    """The largest deviation over some random distributions."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(6):
        distributions = [
            random_distributions(rng, 4 if length == 1 else 3, length - 1) for _ in range(3)
        ]
        found.append(deviation(run(*distributions), distributions[0], length))
    return max(found)


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_wrong_distribution_is_seen(name: str) -> None:
    def run(p: Distributions, q: Distributions, other: Distributions) -> Callable[[Branch], Text]:
        draw = ONE_STEP[name](q, other)
        return lambda rng: drawn_tree(rng, [draw]).verify(verify_rejection, p, rng)

    assert worst(1, run) > SEEN


def test_a_draw_that_is_dropped_before_the_chain_ends_is_seen() -> None:
    def run(p: Distributions, q: Distributions, _: Distributions) -> Callable[[Branch], Text]:
        def chain(rng: Branch) -> Text:
            token = rng.draw(q[()])
            draft = Draft()
            if q[()][token] >= 0.3:
                draft.add(draft.add(-1, token, q[()]), rng.draw(q[token,]), q[token,])
            return draft.verify(verify_rejection, p, rng)

        return chain

    assert worst(2, run) > SEEN


@pytest.mark.parametrize("is_one_hot", [False, True])
def test_pruning_a_sampled_tree_by_value_needs_the_one_hot_rule(is_one_hot: bool) -> None:
    def run(p: Distributions, q: Distributions, _: Distributions) -> Callable[[Branch], Text]:
        def pruned(rng: Branch) -> Text:
            whole = drawn_tree(rng, [swor(q, 2), swor(q, 1)])
            likelihoods = [
                float(np.prod([q[text[:place]][text[place]] for place in range(len(text))]))
                for text in whole.texts[1:]
            ]
            best = set(np.argsort(likelihoods)[-2:].tolist())
            draft = Draft()
            node_of = {-1: -1}
            for node, candidates in enumerate(whole.children):
                for one in candidates:
                    if one.node in best and node - 1 in node_of:
                        declared = None if is_one_hot else one.distribution
                        node_of[one.node] = draft.add(node_of[node - 1], one.token, declared)
            return draft.verify(verify_rejection, p, rng)

        return pruned

    found = worst(3, run)
    assert found < 1e-12 if is_one_hot else found > SEEN


class SharedUniform:
    """Uses one uniform number for two tests that follow one another."""

    def __init__(self, rng: Branch) -> None:
        self._rng = rng
        self._before: tuple[float, bool] | None = None

    def accepts(self, probability: float) -> bool:
        """The same number u decides u < first and then u < second."""
        if self._before is None:
            accepted = self._rng.accepts(probability)
            self._before = (probability, accepted)
            return accepted
        (first, accepted), self._before = self._before, None
        if accepted:
            return self._rng.accepts(min(1.0, probability / first))
        return self._rng.accepts(max(0.0, (probability - first) / (1.0 - first)))

    def draw(self, distribution: Float64) -> int:
        """A draw of its own."""
        return self._rng.draw(distribution)


def test_one_number_for_two_uniforms_is_seen() -> None:
    def run(p: Distributions, q: Distributions, _: Distributions) -> Callable[[Branch], Text]:
        def chain(rng: Branch) -> Text:
            draft = drawn_tree(rng, [iid(q, 1), iid(q, 1)])
            return draft.verify(verify_rejection, p, SharedUniform(rng))

        return chain

    assert worst(2, run) > SEEN


def test_uniforms_of_each_row_of_which_any_accepted_one_is_taken_are_seen() -> None:
    def any_row(
        distributions: Float64, children: list[list[Candidate]], rng: Rng
    ) -> VerificationResult:
        distribution = distributions[0]
        uniforms = [rng.accepts(float(distribution[one.token])) for one in children[0]]
        if any(uniforms):
            node = children[0][uniforms.index(True)].node
            return VerificationResult([node], rng.draw(distributions[node + 1]))
        left = distribution.copy()
        left[[one.token for one in children[0]]] = 0.0
        return VerificationResult([], rng.draw(left / left.sum()))

    def run(p: Distributions, q: Distributions, _: Distributions) -> Callable[[Branch], Text]:
        return lambda rng: drawn_tree(rng, [top(q, 2)]).verify(any_row, p, rng)

    assert worst(1, run) > SEEN


def test_a_residual_that_is_not_updated_is_seen() -> None:
    """The rule itself, with its heart cut out."""

    def forgetful(
        distributions: Float64, children: list[list[Candidate]], rng: Rng
    ) -> VerificationResult:
        for one in children[0]:
            if rng.accepts(one.acceptance(distributions[0])):
                return VerificationResult([one.node], rng.draw(distributions[one.node + 1]))
        return VerificationResult([], rng.draw(children[0][0].residual(distributions[0])))

    def run(p: Distributions, q: Distributions, _: Distributions) -> Callable[[Branch], Text]:
        return lambda rng: drawn_tree(rng, [iid(q, 2)]).verify(forgetful, p, rng)

    assert worst(1, run) > SEEN
