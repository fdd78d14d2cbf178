"""One training step of a feature head: several passes over the same texts.

Pass 1 reads the target's features. Each later pass reads the previous pass's output instead, one
row later, as a draft of that depth would (HASS; GRIFFIN, arXiv 2502.11018, section 3.1). Every pass
is backpropagated at once, so that only one graph is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....models.heads.feature_head import FeatureHead, HeadOutput
from ..target import TextBatch
from .alignment import MaskForm, is_aligned, pass_mask
from .context_replacement import ContextReplacement
from .draft_vocabulary import best_tokens, draft_logits
from .losses import LossWeights, head_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """How a step trains.

    num_passes   drafts of up to this depth are trained on
    is_staged    the run has as many equal parts, and each part adds one pass (GRIFFIN); else all
                 passes from the start (HASS)
    num_aligned  best tokens among which an earlier draft must be for a row to count; 0: all rows
                 count (HASS)
    """

    num_passes: int = 3
    is_staged: bool = False
    num_aligned: int = 3
    mask_form: MaskForm = "paper"
    weights: LossWeights = field(default_factory=LossWeights)

    def passes_at(self, done: float) -> int:
        """Number of passes of a step at the fraction `done` (0 to 1) of the run."""
        if not self.is_staged:
            return self.num_passes
        return min(int(done * self.num_passes) + 1, self.num_passes)


class PassReport(NamedTuple):
    """One pass: its loss, the share of answer rows that it trained on, and the share of these whose
    best draft was the target's own token.
    """

    loss: float
    trained: float
    accuracy: float


class TrainingRows(NamedTuple):
    """Inputs and labels of rows, [texts, rows, ...]. Row t pairs the target's feature of token t
    with token t + 1, and learns the state t + 1, whose logits predict token t + 2.

    embeddings  of the input tokens
    features    input features; for EAGLE-3 several, side by side
    states      labels, the normed last ones
    tokens      int64, labels; `answers`: whether the target generated them
    """

    embeddings: Tensor
    features: Tensor
    states: Tensor
    places: Tensor
    tokens: Tensor
    answers: Tensor


def train_passes(
    head: FeatureHead, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, plan: PassPlan,
    *, done: float = 1.0,
) -> list[PassReport]:  # fmt: skip
    """Add the gradients of every pass to the head's parameters.

    embed    token ids to embeddings, the target's own
    lm_head  features to logits, the target's own
    done     completed fraction of the run, 0 to 1
    """
    rows = text_rows(embed, batch)
    with torch.no_grad():
        target_logits = lm_head(rows.states)
    aligned: list[Tensor] = []
    reports = []
    for said in drafting_passes(head, rows, plan.passes_at(done)):
        logits = lm_head(said.predict)
        mask = pass_mask(aligned, rows.answers, plan.mask_form)
        loss = head_loss(
            said.regress, rows.states, logits, target_logits, mask=mask, weights=plan.weights
        )
        loss.backward()
        is_right = logits.argmax(-1) == target_logits.argmax(-1)
        trained = _share(mask, rows.answers)
        reports.append(PassReport(loss.item(), trained, _share(is_right, mask)))
        if plan.num_aligned:
            aligned.append(is_aligned(logits, rows.tokens, plan.num_aligned))
    return reports


@torch.no_grad()
def depth_acceptance(
    head: FeatureHead, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, depth: int
) -> list[tuple[int, int]]:
    """For each depth of a greedy chain: the number of drafts after accepted ones, and how many are
    accepted.

    Texts are assumed to be greedy: a draft is accepted if it is the text's next token.
    """
    rows = text_rows(embed, batch)
    accepted: list[Tensor] = []
    counts = []
    for said in drafting_passes(head, rows, depth):
        best = best_tokens(head, draft_logits(head, lm_head, said.predict))
        is_right = best == rows.tokens
        follows = pass_mask(accepted, rows.answers)
        counts.append((int(follows.sum()), int((is_right & follows).sum())))
        accepted.append(is_right)
    return counts


def text_rows(embed: nn.Module, batch: TextBatch) -> TrainingRows:
    """The rows of a batch; the last two tokens of a text have no label."""
    features = batch.features[:, :-2]
    with torch.no_grad():
        embeddings = embed(batch.tokens[:, 1:-1])
    places = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    return TrainingRows(
        embeddings, features, batch.states[:, 1:-1], places, batch.tokens[:, 2:],
        batch.answers[:, 2:],
    )  # fmt: skip


def drafting_passes(
    head: FeatureHead, rows: TrainingRows, count: int, *, is_constant: bool = True
) -> Iterator[HeadOutput]:
    """The head's output in each pass.

    is_constant  later passes see the output as a constant, so that each pass can be backpropagated
                 before the next one
    """
    known = head.project(rows.features)
    streams = [known]
    for _ in range(count):
        # The projections of earlier streams are trained in every pass.
        context = ContextReplacement(
            [head.keys_values(rows.embeddings, stream, rows.places) for stream in streams[:-1]]
        )
        said = head(rows.embeddings, streams[-1], rows.places, context)
        yield said
        before = said.regress.detach() if is_constant else said.regress
        # Shifted by one row: each row reads the output of the previous row; the first has none.
        streams.append(torch.cat([known[:, :1], before[:, :-1]], dim=1))


def _share(rows: Tensor, of: Tensor) -> float:
    return int((rows & of).sum()) / max(int(of.sum()), 1)
