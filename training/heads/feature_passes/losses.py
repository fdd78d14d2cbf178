"""What a feature head is trained for: the target's features, its distributions, its best tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the three parts.

    The defaults are those of GRIFFIN's released code, which made its public weights; its paper
    names 0.1 for features and 1 for tokens. EAGLE has no part of best tokens.
    """

    feature: float = 1.0
    token: float = 0.1
    best_tokens: float = 0.5
    num_best: int = 10


def head_loss(
    regress: Tensor, features: Tensor, draft_logits: Tensor, target_logits: Tensor, *,
    mask: Tensor, weights: LossWeights,
) -> Tensor:  # fmt: skip
    """Mean over the rows of `mask` of the weighted parts, in nats where they are of tokens.

    regress, features            [..., rows, hidden_size]  the head's, and what they stand for
    draft_logits, target_logits  [..., rows, vocabulary]
    mask                         bool [..., rows]; 0 where it is empty
    """
    if not mask.any():
        return regress.sum() * 0.0
    log_probs = draft_logits[mask].float().log_softmax(-1)
    target_probs = target_logits[mask].float().softmax(-1)
    loss = weights.feature * functional.smooth_l1_loss(regress[mask], features[mask])
    loss = loss - weights.token * (target_probs * log_probs).sum(-1).mean()
    if weights.best_tokens:
        best = target_probs.topk(weights.num_best, dim=-1)
        chosen = torch.gather(log_probs, -1, best.indices)
        loss = loss - weights.best_tokens * (best.values * chosen).sum(-1).mean()
    return loss


def distribution_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy with the target's distribution, nats; 0 without rows.

    logits, target_logits  [rows, vocabulary]
    """
    if not len(logits):
        return logits.sum() * 0.0
    target_probs = target_logits.float().softmax(-1)
    return -(target_probs * logits.float().log_softmax(-1)).sum(-1).mean()
