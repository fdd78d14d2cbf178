"""The acceptance rules `rejection` and `typical`, on the last stage, where the logits are.

`rejection` tests candidates one by one, each with its own distribution. It is one rule for
Leviathan's and Chen's chains, SPECTRA's greedy and sample verification, SpecInfer's multi-step
sampling and Sequoia's draws without replacement. `typical` is Medusa's (Cai et al. 2024, arXiv
2401.10774), and lossy. See docs/how-it-works.md, "Other rules".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import ROOT, Float64, Int32, Int64
from ...core.steps import SamplingRows, TreeCandidates, Verification, VerificationResult
from ...core.verify.rules import REJECTION, SeededRng
from ...kernels.sampling.reference import process_rows


def verification_results(
    logits: Tensor, sampling: SamplingRows, verification: Verification
) -> tuple[VerificationResult, ...]:
    """The accepted path of each tree, and the token after it.

    logits  float32 [rows, vocabulary], edited; rows of trees come first, each root's before those
            of its nodes, as in `sampling`
    """
    num_rows = sum(1 + tree.num_nodes for tree in verification.trees)
    distributions = target_distributions(logits[:num_rows], sampling)
    if all(tree.rule == REJECTION for tree in verification.trees):
        return verify_rejections(distributions, verification)
    results, first = [], 0
    parts = zip(verification.trees, verification.seeds, verification.positions, strict=True)
    for tree, seed, position in parts:
        of_tree = distributions[first : first + 1 + tree.num_nodes]
        results.append(verify_typical(of_tree, tree, SeededRng(seed, position)))
        first += 1 + tree.num_nodes
    return tuple(results)


def with_verification_results(
    targets: Int32, verification: Verification, results: Sequence[VerificationResult]
) -> Int32:
    """int32 [rows]: `targets` with the tokens that were committed after the rows of each path."""
    targets = targets.copy()
    first = 0
    for tree, (path, token) in zip(verification.trees, results, strict=True):
        tokens = dict(zip(tree.nodes.tolist(), tree.tokens.tolist(), strict=True))
        rows = [0, *(node + 1 for node in path)]
        targets[[first + row for row in rows]] = [*(tokens[node] for node in path), token]
        first += 1 + tree.num_nodes
    return targets


def target_distributions(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """float64 [rows, vocabulary]: the distribution that each row's token is drawn from."""
    distributions = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    distributions.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    sampled = np.flatnonzero(sampling.temperature[: len(logits)])
    if len(sampled):
        rows = torch.from_numpy(sampled).to(logits.device)
        scaled = process_rows(logits[rows].float(), sampling, sampled)
        distributions[rows] = torch.softmax(scaled.double(), dim=-1)
    return distributions


def verify_rejections(
    distributions: Tensor, verification: Verification
) -> tuple[VerificationResult, ...]:
    """A path and a token of each tree, with exactly the target's distribution.

    A candidate is accepted with min(1, r(x) / q(x)); r begins as p and loses q with each refusal.

    distributions  float64 [rows, vocabulary]: of each tree's root and nodes, tree by tree; stays
                   unchanged

    Every iteration tests the next candidate of every tree that has one.
    """
    batch = _Batch.of(verification, distributions.device)
    row, next_test = batch.roots.clone(), batch.first_test[batch.roots].clone()
    left = distributions[row]
    num_uniforms = torch.zeros_like(row)
    accepted_rows: list[Tensor] = []
    while (has_test := next_test < batch.end_test[row]).any():
        test = torch.where(has_test, next_test, 0)
        drawn = batch.distributions.whole(test, distributions.shape[1])
        token = batch.tokens[test][:, None]
        ratio = (left.gather(1, token) / drawn.gather(1, token))[:, 0]
        uniform = batch.uniforms.gather(1, num_uniforms[:, None])[:, 0]
        is_accepted = has_test & (uniform < ratio)
        left = torch.where((has_test & ~is_accepted)[:, None], _residual(left, drawn), left)
        row = torch.where(is_accepted, batch.child_rows[test], row)
        left = torch.where(is_accepted[:, None], distributions[row], left)
        next_test = torch.where(is_accepted, batch.first_test[row], next_test + has_test)
        num_uniforms += has_test
        accepted_rows.append(torch.where(is_accepted, row, -1))
    uniform = batch.uniforms.gather(1, num_uniforms[:, None])
    return batch.verification_results(accepted_rows, draw(left, uniform))


def _residual(left: Tensor, drawn: Tensor) -> Tensor:
    """norm(max(left - q, 0)); where rounding left no mass at all, `left`."""
    weights = (left - drawn).clamp(min=0.0)
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, left)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """All candidates, those that follow one row side by side in the order of their tests.

    roots                 int64 [trees]  each root's row
    first_test, end_test  int64 [rows]   which candidates follow a row
    tokens, child_rows    int64 [candidates]
    distributions         of the candidates
    uniforms              float64 [trees, tests + 1]: the last one draws the token
    """

    roots: Tensor
    first_test: Tensor
    end_test: Tensor
    tokens: Tensor
    child_rows: Tensor
    distributions: CandidateDistributions
    uniforms: Tensor

    @classmethod
    def of(cls, verification: Verification, device: torch.device) -> _Batch:
        """The candidates of all trees of a step, on `device`."""
        trees = verification.trees
        sizes = np.array([1 + tree.num_nodes for tree in trees])
        roots = np.cumsum(sizes) - sizes
        parents = np.concatenate([t.parents + 1 + r for t, r in zip(trees, roots, strict=True)])
        order = np.argsort(parents, kind="stable")
        counts = np.bincount(parents, minlength=int(sizes.sum()))
        children = np.concatenate([t.nodes + 1 + r for t, r in zip(trees, roots, strict=True)])
        tokens = np.concatenate([tree.tokens for tree in trees])
        ids, probs = cut_distributions(trees)
        arrays: dict[str, np.ndarray] = {
            "roots": roots,
            "first_test": np.cumsum(counts) - counts,
            "end_test": np.cumsum(counts),
            "tokens": tokens[order],
            "child_rows": children[order],
        }
        on_device = {
            name: torch.from_numpy(array.astype(np.int64)).to(device)
            for name, array in arrays.items()
        }
        return cls(
            **on_device,
            distributions=CandidateDistributions(
                torch.from_numpy(ids[order]).to(device), torch.from_numpy(probs[order]).to(device)
            ),
            uniforms=torch.from_numpy(_uniforms(verification)).to(device),
        )

    def verification_results(
        self, accepted_rows: Sequence[Tensor], tokens: Tensor
    ) -> tuple[VerificationResult, ...]:
        """The results tree by tree, from each iteration's accepted rows, -1 where there was
        none."""
        roots = self.roots.tolist()
        paths: list[list[int]] = [[] for _ in roots]
        for rows in accepted_rows:
            for path, row, root in zip(paths, rows.tolist(), roots, strict=True):
                if row >= 0:
                    path.append(row - root - 1)
        return tuple(map(VerificationResult, paths, tokens.tolist()))


def _uniforms(verification: Verification) -> Float64:
    most = max(len(tree.tokens) for tree in verification.trees) + 1
    pairs = zip(verification.seeds, verification.positions, strict=True)
    return np.stack([SeededRng(*pair).uniforms(most) for pair in pairs])


EPSILON = 0.09
ALPHA = 0.3
# Keeps the logarithm finite, as in Medusa's code.
LEAST = 1e-5


def verify_typical(
    distributions: Tensor, tree: TreeCandidates, rng: SeededRng
) -> VerificationResult:
    """The longest path of tokens that are likely enough, and a token of the target after it.

    distributions  float64 [nodes + 1, vocabulary]  p after the root and after each node

    A token passes if p(x) > min(epsilon, alpha exp(-H(p))), H in nats; of the longest paths the
    most likely one is taken. The text does not have the target's distribution.
    """
    entropies = -(distributions * torch.log(distributions + LEAST)).sum(dim=1)
    parents = torch.from_numpy(tree.parents).to(distributions.device).long() + 1
    tokens = torch.from_numpy(tree.tokens).to(distributions.device).long()
    likely: list[list[tuple[int, float]]] = [[] for _ in range(len(distributions))]
    least = [least_likelihood(entropy) for entropy in entropies.tolist()]
    probabilities = distributions[parents, tokens].tolist()
    for parent, node, probability in zip(
        tree.parents.tolist(), tree.nodes.tolist(), probabilities, strict=True
    ):
        if probability > least[parent + 1]:
            likely[parent + 1].append((node, probability))
    path = longest_path(likely)
    return VerificationResult(
        path, draw_one(distributions[path[-1] + 1 if path else 0], rng.uniform())
    )


def least_likelihood(entropy: float) -> float:
    """The threshold of a token's probability for a distribution with this entropy, in nats."""
    return min(EPSILON, ALPHA * math.exp(-entropy))


def longest_path(likely: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
    """The longest path of nodes, of several the most likely.

    likely  by node + 1, the root's first: the nodes that pass after it, and their probabilities
    """
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    waiting: list[tuple[int, float, list[int]]] = [(ROOT, 0.0, [])]
    while waiting:
        node, log_likelihood, path = waiting.pop()
        best = max(best, (len(path), log_likelihood, path), key=lambda found: found[:2])
        waiting += [
            (child, log_likelihood + math.log(probability), [*path, child])
            for child, probability in likely[node + 1]
        ]
    return best[2]


@dataclass(frozen=True, slots=True, eq=False)
class CandidateDistributions:
    """The distributions of some candidates; a candidate that was not sampled has a one-hot
    distribution.

    ids    int64 [c, k]
    probs  float64 [c, k]
    """

    ids: Tensor
    probs: Tensor

    def whole(self, indices: Tensor | slice, vocab_size: int) -> Tensor:
        """float64 [n, vocabulary]: the distributions of the candidates at `indices`."""
        ids = self.ids[indices]
        distributions = self.probs.new_zeros(len(ids), vocab_size)
        return (
            distributions.scatter_add_(1, ids, self.probs[indices]) if len(ids) else distributions
        )


def cut_distributions(trees: Sequence[TreeCandidates]) -> tuple[Int64, Float64]:
    """ids and probs, [candidates, k], of all trees' candidates."""
    width = max(1, *(tree.distribution_ids.shape[1] for tree in trees))
    tokens = np.concatenate([tree.tokens for tree in trees])
    ids = np.zeros((len(tokens), width), dtype=np.int64)
    probs = np.zeros((len(tokens), width))
    first = 0
    for tree in trees:
        rows = slice(first, first + len(tree.tokens))
        ids[rows, : tree.distribution_ids.shape[1]] = tree.distribution_ids
        probs[rows, : tree.distribution_probs.shape[1]] = tree.distribution_probs
        first += len(tree.tokens)
    totals = probs.sum(axis=1, keepdims=True)
    is_draw = totals[:, 0] > 0
    ids[~is_draw, 0] = tokens[~is_draw]
    probs[~is_draw, 0] = 1.0
    return ids, np.where(is_draw[:, None], probs / np.where(totals > 0, totals, 1.0), probs)


def draw(distributions: Tensor, uniforms: Tensor) -> Tensor:
    """A token of each distribution, int64 [distributions], with uniforms float64 [distributions,
    1]. Rounding never chooses a token after the last possible one.
    """
    sums = distributions.cumsum(dim=1)
    token = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)[:, 0]
    ids = torch.arange(distributions.shape[1], device=distributions.device)
    last = torch.where(distributions > 0, ids, 0).amax(dim=1)
    return torch.minimum(token, last)


def draw_one(distribution: Tensor, uniform: float) -> int:
    """A token of one distribution, float64 [vocabulary], with one uniform."""
    return int(draw(distribution[None], distribution.new_full((1, 1), uniform)))
