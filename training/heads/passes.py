"""One training step of a feature head: several passes over the same texts.

Pass 1 reads the target's features. Each later pass reads, one row later, what the pass before said
instead of them, as a draft of that depth would (HASS; GRIFFIN, arXiv 2502.11018, section 3.1).
Every pass is backpropagated at once, so that only one graph is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...models.heads.feature_head import FeatureHead, HeadOutput
from .alignment import MaskForm, is_aligned, pass_mask
from .context_replacement import ContextReplacement
from .losses import LossWeights, head_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """How a step trains.

    num_passes   drafts of up to this depth are trained on
    is_staged    as many equal parts of the run: the first trains on one pass, each further one on
                 one more (GRIFFIN); else all passes from the start (HASS)
    num_aligned  best tokens among which an earlier draft must be for a row to count; 0: all rows
                 count (HASS)
    """

    num_passes: int = 3
    is_staged: bool = False
    num_aligned: int = 3
    mask_form: MaskForm = "paper"
    weights: LossWeights = field(default_factory=LossWeights)

    def passes_at(self, done: float) -> int:
        """Passes of a step, when `done` (0 to 1) of the run lies behind."""
        if not self.is_staged:
            return self.num_passes
        return min(int(done * self.num_passes) + 1, self.num_passes)


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
    """Of one pass: its loss, the share of answer rows that it trained on, and in how many of those
    the best draft was the target's own token.
    """

    loss: float
    trained: float
    accuracy: float


class _Rows(NamedTuple):
    """What rows read and learn, [texts, rows, ...]: row t pairs feature t with token t + 1, and
    learns feature t + 1, whose logits are of token t + 2.
    """

    embeddings: Tensor
    known: Tensor
    wanted: Tensor
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
    done     how much of the run lies behind, 0 to 1
    """
    rows = _rows(embed, batch)
    with torch.no_grad():
        target_logits = lm_head(rows.wanted)
    aligned: list[Tensor] = []
    reports = []
    for said in _passes(head, rows, plan.passes_at(done)):
        logits = lm_head(said.predict)
        mask = pass_mask(aligned, rows.answers, plan.mask_form)
        loss = head_loss(
            said.regress, rows.wanted, logits, target_logits, mask=mask, weights=plan.weights
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
    """Of each depth of a greedy chain: drafts that follow accepted ones, and how many are accepted.

    Texts are taken for greedy ones: a draft is accepted where it is the text's next token.
    """
    rows = _rows(embed, batch)
    accepted: list[Tensor] = []
    counts = []
    for said in _passes(head, rows, depth):
        is_right = is_aligned(lm_head(said.predict), rows.tokens, 1)
        follows = pass_mask(accepted, rows.answers)
        counts.append((int(follows.sum()), int((is_right & follows).sum())))
        accepted.append(is_right)
    return counts


def _rows(embed: nn.Module, batch: TextBatch) -> _Rows:
    known = batch.features[:, :-2]
    with torch.no_grad():
        embeddings = embed(batch.tokens[:, 1:-1])
    places = torch.arange(known.shape[1], device=known.device).expand(known.shape[:2])
    return _Rows(
        embeddings, known, batch.features[:, 1:-1], places, batch.tokens[:, 2:],
        batch.answers[:, 2:],
    )  # fmt: skip


def _passes(head: FeatureHead, rows: _Rows, count: int) -> Iterator[HeadOutput]:
    """What the head says in each pass, which may be backpropagated before the next is asked for."""
    streams = [rows.known]
    for _ in range(count):
        # The projections of earlier streams are trained in every pass.
        context = ContextReplacement(
            [head.keys_values(rows.embeddings, stream, rows.places) for stream in streams[:-1]]
        )
        said = head(rows.embeddings, streams[-1], rows.places, context)
        yield said
        # One row later: what was said of a row is read by the next; the first has nothing before.
        streams.append(torch.cat([rows.known[:, :1], said.regress.detach()[:, :-1]], dim=1))


def _share(rows: Tensor, of: Tensor) -> float:
    return int((rows & of).sum()) / max(int(of.sum()), 1)
