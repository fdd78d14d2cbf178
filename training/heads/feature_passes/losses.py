"""Losses of a feature head: the target's features, its distributions, its best tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..processes import mean_count, share_of_rows


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the three parts.

    The defaults are those of GRIFFIN's released code, which made its public weights; its paper
    names 0.1 for features and 1 for tokens. EAGLE has no loss on best tokens.
    """

    feature: float = 1.0
    token: float = 0.1
    best_tokens: float = 0.5
    num_best: int = 10


def head_loss(
    regress: Tensor, features: Tensor, draft_logits: Tensor, target_logits: Tensor, *,
    mask: Tensor, weights: LossWeights,
) -> Tensor:  # fmt: skip
    """Mean over the rows of `mask` of the weighted parts; losses on tokens are in nats.

    The mean is over the rows of all processes, as in `distribution_loss`
    (`training/heads/processes.py`).

    regress, features            [..., rows, hidden_size] the head's output, and the target's
                                 features
    draft_logits, target_logits  [..., rows, vocabulary]
    mask                         bool [..., rows]; 0 where it is empty
    """
    count = mean_count(int(mask.sum()))
    log_probs = draft_logits[mask].float().log_softmax(-1)
    target_probs = target_logits[mask].float().softmax(-1)
    distances = functional.smooth_l1_loss(regress[mask], features[mask], reduction="none")
    losses = weights.feature * distances.mean(-1)
    losses = losses - weights.token * (target_probs * log_probs).sum(-1)
    if weights.best_tokens:
        best = target_probs.topk(min(weights.num_best, target_probs.shape[-1]), dim=-1)
        chosen = torch.gather(log_probs, -1, best.indices)
        losses = losses - weights.best_tokens * (best.values * chosen).sum(-1)
    return share_of_rows(losses, count)


def distribution_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy with the target's distribution, nats; 0 without rows.

    logits, target_logits  [rows, vocabulary]
    """
    target_probs = target_logits.float().softmax(-1)
    losses = -(target_probs * logits.float().log_softmax(-1)).sum(-1)
    return share_of_rows(losses, mean_count(len(logits)))
