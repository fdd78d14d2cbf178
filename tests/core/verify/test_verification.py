"""Merged and cut trees under acceptance rules: all draws and all uniforms are enumerated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.errors import ProtocolError
from draftline.core.proposals import DraftDistributions, Proposal, chain_proposal
from draftline.core.steps import TreeCandidates
from draftline.core.tree.merge import merge
from draftline.core.verify.rules import candidates_of
from support.inputs.enumerated_steps import Propose, committed
from support.inputs.enumeration import Distributions, Text, deviation, random_distributions
from support.inputs.plain_rules import ReferenceRng, Rng, children_of

VOCAB = 3
EXACT = 1e-12


def dyadic_distributions(rng: np.random.Generator, length: int) -> Distributions:
    """Distributions that float32 holds exactly."""
    return {
        text: np.bincount(rng.choice(VOCAB, 16, p=distribution), minlength=VOCAB) / 16
        for text, distribution in random_distributions(rng, VOCAB, length).items()
    }


def drawn(name: str, distributions: Distributions, length: int) -> Propose:
    """A chain of draws, which declares its distributions."""

    def propose(rng: Rng) -> Proposal:
        text: Text = ()
        for _ in range(length):
            text = (*text, rng.draw(distributions[text]))
        probs = np.array([distributions[text[:place]] for place in range(length)], dtype=np.float32)
        ids = np.tile(np.arange(VOCAB, dtype=np.int32), (length, 1))
        proposal = chain_proposal(name, np.array(text, dtype=np.int32))
        declared = DraftDistributions(ids, probs)
        declared.check(proposal.tokens, VOCAB)
        return Proposal(
            name, proposal.tokens, proposal.parents, proposal.log_probs, distributions=declared
        )

    return propose


def grown(
    name: str, distributions: Distributions, widths: tuple[int, ...], *, is_replaced: bool
) -> Propose:
    """A tree of draws, with or without replacement; its nodes stand level by level."""

    def propose(rng: Rng) -> Proposal:
        texts: list[Text] = [()]
        parents: list[int] = []
        declared: list[np.ndarray] = []
        level = [ROOT]
        for width in widths:
            below = []
            for node in level:
                left = distributions[texts[node + 1]]
                for _ in range(width):
                    if not left.any():
                        break
                    # As float32 has it, and as the verifier reads that.
                    told = left.astype(np.float32)
                    exact = told.astype(np.float64) / told.sum(dtype=np.float64)
                    token = rng.draw(exact)
                    below.append(len(parents))
                    parents.append(node)
                    texts.append((*texts[node + 1], token))
                    declared.append(told)
                    if not is_replaced:
                        left = without(left, token)
            level = below
        tokens = np.array([text[-1] for text in texts[1:]], dtype=np.int32)
        ids = np.tile(np.arange(VOCAB, dtype=np.int32), (len(tokens), 1))
        found = DraftDistributions(ids, np.array(declared, dtype=np.float32))
        found.check(tokens, VOCAB)
        log_probs = np.zeros(len(tokens), dtype=np.float32)
        return Proposal(
            name, tokens, np.array(parents, dtype=np.int32), log_probs, distributions=found
        )

    return propose


def without(distribution: np.ndarray, token: int) -> np.ndarray:
    left = distribution.copy()
    left[token] = 0.0
    return left / left.sum() if left.any() else left


def fixed(*tokens: int) -> Propose:
    return lambda _rng: chain_proposal("fixed", np.array(tokens, dtype=np.int32))


@pytest.mark.parametrize("max_nodes", [0, 1, 2, 3, 4, 9])
def test_a_merged_and_cut_tree_keeps_the_target_s_distribution(max_nodes: int) -> None:
    rng = np.random.default_rng(max_nodes)
    target = random_distributions(rng, VOCAB, 3)
    first, second = dyadic_distributions(rng, 2), dyadic_distributions(rng, 2)
    for drafters in (
        [drawn("a", first, 2)],
        [fixed(0, 1), drawn("a", first, 2)],
        [drawn("a", first, 2), fixed(0, 1)],
        [drawn("a", first, 2), drawn("b", second, 2)],
        [drawn("a", first, 1), fixed(2), drawn("b", second, 2)],
    ):
        assert deviation(committed(target, drafters, max_nodes, "rejection"), target, 3) < EXACT


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize(
    ("widths", "max_nodes"), [((2,), 9), ((3,), 2), ((2, 1), 9), ((1, 2), 9), ((2, 2), 4)]
)
def test_trees_of_draws_keep_the_target_s_distribution(
    is_replaced: bool, widths: tuple[int, ...], max_nodes: int
) -> None:
    rng = np.random.default_rng(sum(widths) + max_nodes)
    target = random_distributions(rng, VOCAB, 3)
    tree = grown("a", dyadic_distributions(rng, 2), widths, is_replaced=is_replaced)
    assert deviation(committed(target, [tree], max_nodes, "rejection"), target, 3) < EXACT
    both = committed(target, [fixed(0), tree], max_nodes, "rejection")
    if widths in {(2,), (2, 1)}:
        assert deviation(both, target, 3) < EXACT


@pytest.mark.parametrize("max_nodes", [3, 9])
def test_trees_of_two_models_keep_the_target_s_distribution(max_nodes: int) -> None:
    """SpecInfer's merge: every node is a candidate of each drafter that drew it."""
    rng = np.random.default_rng(max_nodes)
    target = random_distributions(rng, VOCAB, 3)
    both = [
        grown("a", dyadic_distributions(rng, 2), (2,), is_replaced=False),
        grown("b", dyadic_distributions(rng, 2), (2,), is_replaced=True),
    ]
    assert deviation(committed(target, both, max_nodes, "rejection"), target, 2) < EXACT


def test_a_node_that_declares_another_drafter_s_distribution_is_seen() -> None:
    found = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        target, own = random_distributions(rng, VOCAB, 3), dyadic_distributions(rng, 2)
        other = drawn("a", dyadic_distributions(rng, 2), 1)
        pair = [other, lied(drawn("b", own, 1), dyadic_distributions(rng, 2)[()])]
        found.append(deviation(committed(target, pair, 9, "rejection"), target, 2))
    assert max(found) > 1e-3


def lied(chain: Propose, distribution: np.ndarray) -> Propose:
    """A chain of one draw that declares another distribution, wherever that has its token."""

    def propose(rng: Rng) -> Proposal:
        found = chain(rng)
        declared = found.distributions
        assert declared is not None
        if not distribution[found.tokens[0]]:
            return found
        probs = distribution[None].astype(np.float32)
        return replace(found, distributions=replace(declared, probs=probs))

    return propose


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("widths", [(1, 1), (2, 1)])
def test_trees_deeper_than_what_is_left_of_an_answer_keep_the_target_s_distribution(
    is_replaced: bool, widths: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(sum(widths))
    target = random_distributions(rng, VOCAB, 3)
    tree = grown("a", dyadic_distributions(rng, 2), widths, is_replaced=is_replaced)
    run = committed(target, [tree], 9, "rejection", max_depth=1)
    assert deviation(run, target, 2) < EXACT


def by_value(tree: Propose, distributions: Distributions) -> Propose:
    """The likelier of two drawn siblings first."""

    def propose(rng: Rng) -> Proposal:
        found = tree(rng)
        order = sorted(range(2), key=lambda node: -distributions[()][found.tokens[node]])
        declared = found.distributions
        assert declared is not None
        return Proposal(
            found.source, found.tokens[order], found.parents, found.log_probs,
            distributions=declared.rows([0, 1]),
        )  # fmt: skip

    return propose


def told(tree: Propose, first: int) -> Propose:
    """Every node declares what node `first` does."""

    def propose(rng: Rng) -> Proposal:
        found = tree(rng)
        declared = found.distributions
        assert declared is not None
        same = declared.rows([first] * len(found.tokens))
        return replace(found, distributions=same)

    return propose


@pytest.mark.parametrize("name", ["sorted by value", "without replacement, not renormalised"])
def test_wrong_trees_of_draws_are_seen(name: str) -> None:
    found = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        target, distributions = random_distributions(rng, VOCAB, 3), dyadic_distributions(rng, 2)
        if name == "sorted by value":
            pair = grown("a", distributions, (2,), is_replaced=True)
            tree = by_value(pair, distributions)
        else:
            tree = told(grown("a", distributions, (2,), is_replaced=False), 0)
        found.append(deviation(committed(target, [tree], 9, "rejection"), target, 2))
    assert max(found) > 1e-2


def test_a_tree_that_was_cut_by_value_is_seen() -> None:
    rng = np.random.default_rng(8)
    target, distributions = random_distributions(rng, VOCAB, 3), dyadic_distributions(rng, 2)
    tree = grown("a", distributions, (2,), is_replaced=False)

    def likelier(found_by: Rng) -> Proposal:
        found = tree(found_by)
        kept = [
            max(range(len(found.tokens)), key=lambda node: distributions[()][found.tokens[node]])
        ]
        declared = found.distributions
        assert declared is not None
        return Proposal(
            "a", found.tokens[kept], found.parents[kept], found.log_probs[kept],
            distributions=declared.rows(kept),
        )  # fmt: skip

    assert deviation(committed(target, [likelier], 9, "rejection"), target, 2) > 1e-3


def test_a_cut_that_looks_at_the_drawn_token_is_seen() -> None:
    """A node that has no room, but stands in the tree by chance, must not be tested."""
    rng = np.random.default_rng(4)
    target, distribution = random_distributions(rng, VOCAB, 3), dyadic_distributions(rng, 2)
    run = committed(target, [fixed(0), drawn("a", distribution, 1)], 1, "rejection", room=9)
    assert deviation(run, target, 2) > 1e-3


def test_typical_acceptance_is_lossy() -> None:
    rng = np.random.default_rng(1)
    target, distribution = random_distributions(rng, VOCAB, 3), dyadic_distributions(rng, 2)
    assert (
        deviation(committed(target, [drawn("a", distribution, 2)], 9, "typical"), target, 3) > 1e-3
    )


def test_candidates_by_hand() -> None:
    distributions = DraftDistributions(
        np.array([[5, 6], [5, 7]], dtype=np.int32), np.array([[0.5, 0.5], [1, 0]], dtype=np.float32)
    )
    chain = chain_proposal("drawn", np.array([6, 5], dtype=np.int32))
    model = Proposal(
        "drawn", chain.tokens, chain.parents, chain.log_probs, distributions=distributions
    )
    found = [chain_proposal("fixed", np.array([6, 9], dtype=np.int32)), model]
    tree = merge(found, 9, 9)
    candidates = candidates_of("rejection", tree, found, 9)
    assert candidates.parents.tolist() == [ROOT, 0, ROOT, 0]
    assert candidates.nodes.tolist() == [0, 1, 0, 2]
    assert candidates.tokens.tolist() == [6, 9, 6, 5]
    children = children_of(candidates, 10)
    assert [one.distribution is None for one in children[0]] == [True, False]
    assert children[0][1].distribution is not None
    assert np.flatnonzero(children[0][1].distribution).tolist() == [5, 6]
    assert isinstance(candidates_of("rejection", tree, found, 1), TreeCandidates)
    assert candidates_of("rejection", tree, found, 1).nodes.tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([[0, 1]], [[0.5, 0.4]]),
        ([[0, 9]], [[0.5, 0.5]]),
        ([[0, 2]], [[0.5, 0.5]]),
        ([[1, 2]], [[1.5, -0.5]]),
        ([[1, 2]], [[float("nan"), 1.0]]),
        ([[1], [1]], [[1.0], [1.0]]),
        ([1], [1.0]),
    ],
)
def test_impossible_distributions_are_refused(
    ids: list[list[int]], probs: list[list[float]]
) -> None:
    distributions = DraftDistributions(
        np.array(ids, dtype=np.int32), np.array(probs, dtype=np.float32)
    )
    with pytest.raises(ProtocolError, match="distributions"):
        distributions.check(np.array([1], dtype=np.int32), 5)


def test_chances_are_fair_and_repeat() -> None:
    distribution = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    draws = [ReferenceRng(seed, 7).draw(distribution) for seed in range(4000)]
    assert set(draws) == {1, 3}
    # Three standard errors.
    assert abs(np.mean([draw == 1 for draw in draws]) - 0.3) < 3 * np.sqrt(0.21 / 4000)
    uniforms = [ReferenceRng(3, position).accepts(0.25) for position in range(4000)]
    assert abs(np.mean(uniforms) - 0.25) < 3 * np.sqrt(0.1875 / 4000)
    assert ReferenceRng(5, 6).draw(distribution) == ReferenceRng(5, 6).draw(distribution)
