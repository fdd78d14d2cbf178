"""One training step of a feature head: several passes over the same texts.

Pass 1 reads the target's features. Each later pass reads, one row later, what the pass before said
instead of them, as a draft of that depth would (HASS; GRIFFIN, arXiv 2502.11018, section 3.1).
Every pass is backpropagated at once, so that only one graph is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...models.heads.feature_head import FeatureHead
from .alignment import MaskForm, is_aligned, pass_mask
from .context_replacement import ContextReplacement
from .losses import LossWeights, head_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """How a step trains.

    num_passes   drafts of up to this depth are trained on
    num_aligned  best tokens among which an earlier draft must be for a row to count; 0: all rows
                 count (HASS)
    """

    num_passes: int = 3
    num_aligned: int = 3
    mask_form: MaskForm = "paper"
    weights: LossWeights = field(default_factory=LossWeights)


class TextBatch(NamedTuple):
    """Texts of a step.

    tokens    int64 [texts, length]
    features  [texts, length, hidden_size]  of the target, the normed last state of each token
    answers   bool [texts, length]  the tokens that the target said
    """

    tokens: Tensor
    features: Tensor
    answers: Tensor


class PassReport(NamedTuple):
    """Of one pass: its loss, the share of answer rows that it trained on, and how many of those
    rows had the target's own token as the best draft.
    """

    loss: float
    trained: float
    accuracy: float


def train_passes(
    head: FeatureHead, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, plan: PassPlan
) -> list[PassReport]:
    """Add the gradients of every pass to the head's parameters.

    embed    token ids to embeddings, the target's own
    lm_head  features to logits, the target's own

    Row t pairs feature t with token t + 1, and learns feature and logits of token t + 1.
    """
    with torch.no_grad():
        embeddings = embed(batch.tokens[:, 1:-1])
        known, wanted = batch.features[:, :-2], batch.features[:, 1:-1]
        target_logits = lm_head(wanted)
    rows = torch.arange(known.shape[1], device=known.device).expand(known.shape[:2])
    answers, tokens = batch.answers[:, 2:], batch.tokens[:, 2:]
    streams: list[Tensor] = [known]
    aligned: list[Tensor] = []
    reports = []
    for _ in range(plan.num_passes):
        said = head(embeddings, streams[-1], rows, _context(head, embeddings, streams, rows))
        logits = lm_head(said.predict)
        mask = pass_mask(aligned, answers, plan.mask_form)
        loss = head_loss(
            said.regress, wanted, logits, target_logits, mask=mask, weights=plan.weights
        )
        loss.backward()
        reports.append(_report(loss, logits, target_logits, mask, answers))
        if plan.num_aligned:
            aligned.append(is_aligned(logits, tokens, plan.num_aligned))
        streams.append(_one_row_later(known, said.regress))
    return reports


def _context(
    head: FeatureHead, embeddings: Tensor, streams: list[Tensor], rows: Tensor
) -> ContextReplacement:
    """Keys and values of the streams before the last, whose projections are trained, too."""
    attention = head.layers[0].self_attn
    rotation = head.rotation(embeddings, rows)
    return ContextReplacement(
        [attention.keys_values(head.fuse(embeddings, one), rotation) for one in streams[:-1]]
    )


def _one_row_later(features: Tensor, said: Tensor) -> Tensor:
    """What was said of the row before; the first row keeps the target's feature."""
    return torch.cat([features[:, :1], said.detach()[:, :-1]], dim=1)


@torch.no_grad()
def _report(
    loss: Tensor, logits: Tensor, target_logits: Tensor, mask: Tensor, answers: Tensor
) -> PassReport:
    count = max(int(answers.sum()), 1)
    is_right = logits.argmax(-1) == target_logits.argmax(-1)
    accuracy = float((is_right & mask).sum()) / max(int(mask.sum()), 1)
    return PassReport(loss.item(), int(mask.sum()) / count, accuracy)
