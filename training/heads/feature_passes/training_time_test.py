"""One training step of EAGLE-3: the passes that a drafter makes, as one graph (arXiv 2503.01840).

Its "training-time test": pass 1 reads the target's features, and each later pass the previous
pass's output, as in drafting. There is no loss on features, only on tokens. It is backpropagated
through all previous passes (SafeAILab/EAGLE, traineagle3).
"""

from __future__ import annotations

import torch
from torch import nn

from ....models.heads.feature_head import FeatureHead
from ..target import TextBatch
from .alignment import pass_mask
from .draft_vocabulary import best_tokens, draft_logits, vocabulary_of
from .losses import distribution_loss
from .passes import PassReport, drafting_passes, text_rows

# Ratio of a pass's loss weight to that of the previous pass.
PASS_DECAY = 0.8


def train_as_tested(
    head: FeatureHead, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, num_passes: int
) -> list[PassReport]:
    """Add the gradients of `num_passes` passes to the head's parameters.

    embed, lm_head  the target's, which stay frozen

    A row counts if the head can draft the target's most probable token. The loss is the
    cross-entropy with the target's distribution over those tokens, sum 1. Only one pass's logits
    are in memory.
    """
    rows = text_rows(embed, batch)
    vocabulary = vocabulary_of(head)
    with torch.no_grad():
        target_logits = lm_head(rows.states)
        wanted = target_logits.argmax(-1)
        target_logits = target_logits[..., vocabulary]
    is_known = rows.answers & torch.isin(wanted, vocabulary)
    every_row = torch.ones_like(rows.answers)
    said_states, gradients, reports = [], [], []
    for index, said in enumerate(drafting_passes(head, rows, num_passes, is_constant=False)):
        leaf = said.predict.detach().requires_grad_()
        # The first rows have no earlier drafts to continue.
        mask = pass_mask([every_row] * index, is_known)
        logits = draft_logits(head, lm_head, leaf[mask])
        loss = distribution_loss(logits, target_logits[mask])
        (PASS_DECAY**index * loss).backward()
        said_states.append(said.predict)
        gradients.append(leaf.grad)
        is_right = best_tokens(head, logits) == wanted[mask]
        trained = int(mask.sum()) / max(int(rows.answers.sum()), 1)
        accuracy = int(is_right.sum()) / max(len(is_right), 1)
        reports.append(PassReport(loss.item(), trained, accuracy))
    torch.autograd.backward(said_states, gradients)
    return reports
