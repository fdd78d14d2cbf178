"""Distributions of candidates, and draws from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Float64, Int64
from ...core.steps import TreeCandidates


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


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Rows of `weights` as distributions; where rounding left no mass, those of `otherwise`."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
