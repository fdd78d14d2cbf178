"""Applies an acceptance rule beside the logits, on the last stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.steps import SamplingRows, Verification, VerificationResult
from ...core.verify.rules import REJECTION, SeededRng
from ...kernels.sampling.reference import process_rows
from .rejection import verify_rejections
from .typical import verify_typical


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
