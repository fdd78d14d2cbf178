"""k-sequential selection beside the logits: `core/verify/k_seq.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arrays import ROOT
from ...core.steps import TreeCandidates, VerificationResult
from ...core.verify.k_seq import HALVINGS
from ...core.verify.rules import SeededRng
from .candidates import CandidateDistributions, draw_one, normalised


def verify_k_seq(distributions: Tensor, tree: TreeCandidates, rng: SeededRng) -> VerificationResult:
    """The path of a tree that the rule accepts, and the token after it.

    distributions  float64 [nodes + 1, vocabulary]  the root's, then each node's
    """
    candidates = CandidateDistributions.of(tree, distributions.device)
    nodes, tokens = (
        tree.nodes.tolist(),
        torch.from_numpy(tree.tokens).to(distributions.device).long(),
    )
    path: list[int] = []
    node = ROOT
    while len(indices := (tree.parents == node).nonzero()[0]):
        distribution = distributions[node + 1]
        # Those of one node are draws of one distribution.
        drawn = candidates.whole(slice(indices[0], indices[0] + 1), len(distribution))[0]
        rho, residual = _selection(distribution, drawn, len(indices))
        chosen = tokens[torch.from_numpy(indices).to(tokens.device)]
        ratios = (distribution[chosen] / (rho * drawn[chosen])).clamp(max=1.0).tolist()
        for index, probability in zip(indices.tolist(), ratios, strict=True):
            if rng.accepts(probability):
                node = nodes[index]
                path.append(node)
                break
        else:
            return VerificationResult(path, draw_one(residual, rng.uniform()))
    return VerificationResult(path, draw_one(distributions[node + 1], rng.uniform()))


def _selection(distribution: Tensor, drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """rho, and the distribution that is left if all candidates fail."""
    low, rho = distribution.new_ones(()), distribution.new_full((), count)
    for _ in range(HALVINGS):
        middle = (low + rho) / 2
        beta = torch.minimum(drawn, distribution / middle).sum()
        is_enough = 1.0 - (1.0 - beta) ** count <= middle * beta
        low, rho = torch.where(is_enough, low, middle), torch.where(is_enough, middle, rho)
    shared = torch.minimum(drawn, distribution / rho)
    share = shared.sum()
    taken = torch.where(share > 0, shared * (1.0 - (1.0 - share) ** count) / share, 0.0)
    return rho, normalised((distribution - taken).clamp(min=0.0), distribution)
