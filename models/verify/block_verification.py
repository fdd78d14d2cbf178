"""Block verification beside the logits: `core/verify/block_verification.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.steps import TreeCandidates, VerificationResult
from ...core.verify.block_verification import kept_length
from ...core.verify.rules import SeededRng
from .candidates import CandidateDistributions, draw_one, normalised


def verify_block(distributions: Tensor, tree: TreeCandidates, rng: SeededRng) -> VerificationResult:
    """The path of a chain that the rule accepts, and the token after it.

    distributions  float64 [chain + 1, vocabulary]  the root's, then each node's
    """
    count = len(tree.tokens)
    tokens = torch.from_numpy(tree.tokens).to(distributions.device).long()[:, None]
    drawn = CandidateDistributions.of(tree, distributions.device).whole(
        slice(None), distributions.shape[1]
    )
    ratios = distributions[:count].gather(1, tokens) / drawn.gather(1, tokens)
    scales = [1.0]
    for ratio in ratios[:, 0].tolist():
        scales.append(min(1.0, scales[-1] * ratio))
    scale = distributions.new_tensor(scales[:count])[:, None]
    surplus = (scale * distributions[:count] - drawn).clamp(min=0.0)
    length = kept_length(scales, surplus.sum(dim=1).tolist(), rng)
    distribution = distributions[length]
    if length < count:
        distribution = normalised(surplus[length], distribution)
    return VerificationResult(tree.nodes[:length].tolist(), draw_one(distribution, rng.uniform()))
