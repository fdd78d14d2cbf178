"""Block verification beside the logits: `core/verify/block_verification.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.candidates import Verdict
from ...core.verify.block_verification import kept_length
from ...core.verify.rng import SeededChance
from ...core.verify.verification import TreeCandidates
from .candidates import CandidateLaws, draw_one, normalised


def verify_block(laws: Tensor, tree: TreeCandidates, chance: SeededChance) -> Verdict:
    """What the rule decides about a chain; laws float64 [chain + 1, vocabulary]."""
    count = len(tree.tokens)
    tokens = torch.from_numpy(tree.tokens).to(laws.device).long()[:, None]
    drawn = CandidateLaws.of(tree, laws.device).whole(slice(None), laws.shape[1])
    ratios = laws[:count].gather(1, tokens) / drawn.gather(1, tokens)
    scales = [1.0]
    for ratio in ratios[:, 0].tolist():
        scales.append(min(1.0, scales[-1] * ratio))
    scale = laws.new_tensor(scales[:count])[:, None]
    surplus = (scale * laws[:count] - drawn).clamp(min=0.0)
    length = kept_length(scales, surplus.sum(dim=1).tolist(), chance)
    law = laws[length]
    if length < count:
        law = normalised(surplus[length], law)
    return Verdict(tree.nodes[:length].tolist(), draw_one(law, chance.coin()))
