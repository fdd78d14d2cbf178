"""Exact rules give the target's distribution: all draws and all uniforms are enumerated."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.arrays import Float64
from support.inputs.drafts import Draft, Draw, Rule, both, drawn_tree, iid, swor, top, without
from support.inputs.enumeration import (
    Distributions,
    Text,
    deviation,
    outcomes,
    random_distributions,
)
from support.inputs.plain_rules import Rng, verify_rejection, verify_typical

EXACT = 1e-12


def one_step(target: Distributions, draw: Draw, rule: Rule = verify_rejection) -> float:
    """Total variation of a step over one level of candidates."""
    return deviation(lambda rng: drawn_tree(rng, [draw]).verify(rule, target, rng), target, 1)


def cases(
    seed: int, count: int, vocab: int, length: int, alpha: float = 0.7
) -> list[list[Distributions]]:
    """Distributions of a target and two drafters."""
    rng = np.random.default_rng(seed)
    return [
        [random_distributions(rng, vocab, length, alpha) for _ in range(3)] for _ in range(count)
    ]


def sorted_one_hot(distributions: Distributions) -> Draw:
    """Sampled, without repeats, sorted by their distribution, and declared one-hot."""

    def draw(rng: Rng, text: Text) -> list[tuple[int, Float64 | None]]:
        tokens = {token for token, _ in iid(distributions, 3)(rng, text)}
        return [
            (token, None) for token in sorted(tokens, key=lambda one: -distributions[text][one])
        ]

    return draw


def conditioned(distributions: Distributions) -> Draw:
    """A draw that is dropped below a threshold, its distribution conditioned on what is kept."""

    def draw(rng: Rng, text: Text) -> list[tuple[int, Float64 | None]]:
        distribution = distributions[text]
        kept = np.where(distribution >= np.median(distribution), distribution, 0.0)
        token = rng.draw(distribution)
        return [(token, kept / kept.sum())] if kept[token] > 0 else []

    return draw


def skipped_repeat(first: Distributions, second: Distributions) -> Draw:
    """Two drafters; the second's token is left out where it is the first's, its distribution
    without it.
    """

    def draw(rng: Rng, text: Text) -> list[tuple[int, Float64 | None]]:
        x, y = rng.draw(first[text]), rng.draw(second[text])
        candidates: list[tuple[int, Float64 | None]] = [(x, first[text])]
        return candidates if x == y else [*candidates, (y, without(second[text], x))]

    return draw


def after_its_cause(distributions: Distributions) -> Draw:
    """A draw, then a token that is computed from it."""

    def draw(rng: Rng, text: Text) -> list[tuple[int, Float64 | None]]:
        token = rng.draw(distributions[text])
        return [(token, distributions[text]), ((token + 1) % len(distributions[text]), None)]

    return draw


def mixture(first: Distributions, second: Distributions, *, declares_mixture: bool) -> Draw:
    """A drafter that a public uniform number chooses."""

    def draw(rng: Rng, text: Text) -> list[tuple[int, Float64 | None]]:
        distribution = first[text] if rng.accepts(0.3) else second[text]
        declared = 0.3 * first[text] + 0.7 * second[text] if declares_mixture else distribution
        return [(rng.draw(distribution), declared)]

    return draw


@pytest.mark.parametrize("seed", range(3))
def test_rejection_is_exact_for_every_list_of_candidates(seed: int) -> None:
    for target, first, second in cases(seed, 4, 4, 0):
        draws = {
            "chain": iid(first, 1),
            "iid": iid(first, 3),
            "swor": swor(first, 3),
            "top": top(first, 2),
            "top, iid, swor": both(top(first, 2), iid(first, 2), swor(second, 1)),
            "swor, top, iid": both(swor(second, 2), top(first, 2), iid(first, 1)),
            "sorted, one-hot": sorted_one_hot(first),
            "conditioned": conditioned(first),
            "repeat tested twice": both(iid(first, 1), iid(second, 1)),
            "repeat skipped": skipped_repeat(first, second),
            "after its cause": after_its_cause(first),
            "mixture, own distribution": mixture(first, second, declares_mixture=False),
            "mixture, mixed distribution": mixture(first, second, declares_mixture=True),
        }
        for name, draw in draws.items():
            assert one_step(target, draw) < EXACT, name


def distribution(*weights: float) -> Distributions:
    return {(): np.array(weights) / sum(weights)}


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        pytest.param(distribution(3, 2, 1), distribution(3, 2, 1), id="equal distributions"),
        pytest.param(distribution(1, 1, 0, 0), distribution(0, 0, 1, 1), id="disjoint"),
        pytest.param(distribution(0, 1, 0), distribution(1, 1, 1), id="one-hot target"),
        pytest.param(distribution(1, 2, 3), distribution(0, 1, 0), id="one-hot drafter"),
        pytest.param(distribution(0, 1, 1), distribution(1, 1, 0), id="zeros in both"),
    ],
)
def test_distributions_at_the_border(target: Distributions, drafter: Distributions) -> None:
    for draw in (iid(drafter, 3), swor(drafter, 3), top(drafter, 3)):
        assert one_step(target, draw) < EXACT


SHAPES = {
    "iid 2, 2": lambda q: [iid(q, 2), iid(q, 2)],
    "iid 1, 2": lambda q: [iid(q, 1), iid(q, 2)],
    "swor 2, 2": lambda q: [swor(q, 2), swor(q, 2)],
    "swor 2, 1": lambda q: [swor(q, 2), swor(q, 1)],
    "swor, then top and a draw": lambda q: [swor(q, 2), both(top(q, 1), iid(q, 1))],
    "top": lambda q: [top(q, 2), top(q, 2)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_several_levels(shape: str) -> None:
    for target, drafter, _ in cases(8, 2, 3, 2):
        draws = SHAPES[shape](drafter)
        found = deviation(
            lambda rng, p=target, d=draws: drawn_tree(rng, d).verify(verify_rejection, p, rng),
            target,
            3,
        )
        assert found < EXACT


def test_only_the_likelier_of_two_drawn_siblings_may_be_expanded() -> None:
    for target, drafter, _ in cases(9, 2, 3, 2):

        def tree(rng: Rng, q: Distributions = drafter) -> Draft:
            draft = drawn_tree(rng, [swor(q, 2)])
            best = max(draft.children[0], key=lambda one: q[()][one.token])
            for token, declared in swor(q, 2)(rng, (best.token,)):
                draft.add(best.node, token, declared)
            return draft

        found = deviation(
            lambda rng, p=target, t=tree: t(rng).verify(verify_rejection, p, rng), target, 3
        )
        assert found < EXACT


def test_a_drawn_token_may_be_included_and_end_the_chain() -> None:
    for target, drafter, _ in cases(10, 3, 3, 2):

        def chain(rng: Rng, q: Distributions = drafter) -> Draft:
            draft = drawn_tree(rng, [iid(q, 1)])
            (first,) = draft.children[0]
            if q[()][first.token] >= 0.3:
                draft.add(first.node, rng.draw(q[first.token,]), q[first.token,])
            return draft

        found = deviation(
            lambda rng, p=target, t=chain: t(rng).verify(verify_rejection, p, rng), target, 3
        )
        assert found < EXACT


def test_typical_acceptance_takes_the_longest_likely_path_and_is_lossy() -> None:
    target: Distributions = {
        (): np.array([0.6, 0.4, 0.0]),
        (0,): np.array([0.98, 0.01, 0.01]),
        (1,): np.array([0.5, 0.5, 0.0]),
        (1, 0): np.array([0.0, 0.0, 1.0]),
    }
    draft = Draft()
    zero, one = draft.add(-1, 0, None), draft.add(-1, 1, None)
    draft.add(zero, 2, None)
    draft.add(one, 0, None)
    found = {text for _, text in outcomes(lambda c: draft.verify(verify_typical, target, c))}
    # 0 is likelier than 1, but what follows it is not likely enough.
    assert found == {(1, 0, 2)}
    assert max(one_step(p, top(q, 2), verify_typical) for p, q, _ in cases(11, 5, 4, 0)) > 0.05
