"""One training step of P-EAGLE: masks after random rows of the texts (arXiv 2602.01469).

Draft 0 after a row is EAGLE-3's prediction; draft d is that of the d-th mask after it. The masks of
a row, its rollout, see the text up to the row and the earlier masks of the rollout, as in drafting.
All rollouts of a text are computed in one pass. Each depth keeps a share of the rollouts of the one
before it (conditional drop, arXiv 2504.18583; speculators).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.heads.p_eagle import PEagle
from .feature_passes import (
    TrainingRows,
    best_tokens,
    distribution_loss,
    draft_logits,
    drafted_logits,
    text_rows,
    vocabulary_of,
)
from .processes import mean_count
from .target import TextBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPlan:
    """How a step trains.

    keep_rate   share of a depth's rollouts that reach the next depth
    least_kept  least share of a text's rows that have masks of every depth
    """

    keep_rate: float = 0.7
    least_kept: float = 0.2

    def share_at(self, depth: int) -> float:
        """The share of a text's rows whose rollouts reach a depth."""
        return max(self.keep_rate**depth, self.least_kept)


class Rollouts(NamedTuple):
    """Rows of texts that are followed by masks, those with most masks first.

    anchors    int64 [texts, rollouts]  the rows, each once in its text
    num_masks  int64 [texts, rollouts]  how many masks
    """

    anchors: Tensor
    num_masks: Tensor


class Depth(NamedTuple):
    """The drafts of one depth, [texts, width]: of all rows of the texts, or of rollouts.

    places    int64 the texts' rows that predict the same tokens
    is_known  bool whether the draft is made, and the target generated its token
    """

    places: Tensor
    is_known: Tensor


def random_rollouts(
    batch: TextBatch, draft_length: int, plan: MaskPlan, uniform: Tensor
) -> Rollouts:
    """Rollouts at random rows whose draft the target generated, with depths by the plan.

    uniform  float32 [texts, length]  random numbers from 0 to 1; rows of the largest go deepest

    No rollout goes beyond the end of the text.
    """
    answers = batch.answers[:, 2:]
    order = uniform[:, : answers.shape[1]].masked_fill(~answers, -1.0)
    ranks = order.argsort(dim=-1, descending=True).argsort(dim=-1)
    count = answers.sum(-1, keepdim=True)
    reach = torch.zeros_like(ranks)
    for depth in range(1, draft_length):
        reach += ranks < (count * plan.share_at(depth)).ceil()
    return _deepest_first(reach.minimum(_known_masks(answers, draft_length)))


def every_rollout(batch: TextBatch, draft_length: int, stride: int = 1) -> Rollouts:
    """A rollout up to the end of the text at each row, or at some of them."""
    known = _known_masks(batch.answers[:, 2:], draft_length)
    is_kept = torch.arange(known.shape[1], device=known.device) % stride == 0
    return _deepest_first(known * is_kept)


def train_masks(
    head: PEagle, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, rollouts: Rollouts
) -> list[float]:
    """Add gradients to the head's parameters; the mean loss of each draft, nats a token.

    embed, lm_head  the target's, which stay frozen

    The loss is a mean over the texts' rows and all masks: the cross-entropy with the target's
    distribution over the head's tokens, sum 1. Only rows whose token is one of these count.
    """
    rows = _rows(head, embed, batch)
    with torch.no_grad():
        target_logits = drafted_logits(head, lm_head, rows.states)
    is_drafted = torch.isin(rows.tokens, vocabulary_of(head))
    depths = list(rollout_depths(rows, rollouts, head.config.draft_length))
    masks = [depth.is_known & is_drafted.gather(1, depth.places) for depth in depths]
    counts = [mean_count(int(mask.sum())) for mask in masks]
    outputs = depth_states(head, embed, rows, rollouts)
    gradients, losses = [], []
    for depth, states, mask, count in zip(depths, outputs, masks, counts, strict=True):
        # Separate leaves, so that only one depth's logits are in memory.
        leaf = states.detach().requires_grad_()
        texts, rows_of = mask.nonzero(as_tuple=True)
        wanted = target_logits[texts, depth.places[texts, rows_of]]
        loss = distribution_loss(draft_logits(head, lm_head, leaf[mask]), wanted)
        (count / (sum(counts) or 1.0) * loss).backward()
        gradients.append(leaf.grad)
        losses.append(loss.item())
    torch.autograd.backward(outputs, gradients)
    return losses


@torch.no_grad()
def mask_acceptance(
    head: PEagle, embed: nn.Module, lm_head: nn.Module, batch: TextBatch, stride: int = 4
) -> list[tuple[int, int]]:
    """Of each draft: how often it follows accepted ones, and how often it is accepted then.

    Texts are assumed to be greedy. First drafts are counted at every row, further ones after every
    fourth row: masks after all rows would take as long as many steps.
    """
    counts = torch.zeros(head.config.draft_length, 2, dtype=torch.int64)
    for text in range(len(batch.tokens)):
        one = TextBatch(*(part[text : text + 1] for part in batch))
        rows = _rows(head, embed, one)
        rollouts = every_rollout(one, head.config.draft_length, stride)
        is_right = torch.zeros(0)
        depths = rollout_depths(rows, rollouts, head.config.draft_length)
        outputs = depth_states(head, embed, rows, rollouts)
        for index, (depth, states) in enumerate(zip(depths, outputs, strict=True)):
            follows = depth.is_known
            if index:
                width = follows.shape[1]
                before = is_right.gather(1, rollouts.anchors) if index == 1 else is_right
                follows = follows & before[:, :width]
            best = best_tokens(head, draft_logits(head, lm_head, states))
            is_right = follows & (best == rows.tokens.gather(1, depth.places))
            counts[index] += torch.tensor([int(follows.sum()), int(is_right.sum())])
    return [(follows, right) for follows, right in counts.tolist()]


def rollout_depths(rows: TrainingRows, rollouts: Rollouts, draft_length: int) -> Iterator[Depth]:
    """Draft 0 of every row of the texts, then draft d of the rollouts that have it, from 1 on."""
    yield Depth(rows.places, rows.answers)
    for depth, width in enumerate(_widths(rollouts, draft_length), start=1):
        places = rollouts.anchors[:, :width] + depth
        is_known = rollouts.num_masks[:, :width] >= depth
        yield Depth(places.clamp(max=rows.places.shape[1] - 1), is_known)


def depth_states(
    head: PEagle, embed: nn.Module, rows: TrainingRows, rollouts: Rollouts
) -> list[Tensor]:
    """The states that predict the drafts of `rollout_depths`: [texts, width, hidden_size] for each
    depth."""
    widths = _widths(rollouts, head.config.draft_length)
    texts, num_rows = rows.places.shape
    anchors = torch.cat([rows.places, *(rollouts.anchors[:, :width] for width in widths)], dim=1)
    counts = torch.tensor([num_rows, *widths], device=anchors.device)
    depths = torch.arange(len(counts), device=anchors.device).repeat_interleave(counts)
    num_masks = sum(widths)
    mask_token = anchors.new_full((texts, num_masks), head.config.mask_token)
    mask_features = head.masks(num_masks).expand(texts, -1, -1)
    output = head(
        torch.cat([rows.embeddings, _embed(head, embed)(mask_token)], dim=1),
        torch.cat([head.project(rows.features), mask_features], dim=1),
        anchors + depths,
        RolloutAttention(seen_rows(anchors, depths)),
    )
    return list(output.predict.split(counts.tolist(), dim=1))


def seen_rows(anchors: Tensor, depths: Tensor) -> Tensor:
    """bool [texts, rows, rows]: which rows each row sees; rows of depth 0 are the texts' own.

    anchors  int64 [texts, rows]
    depths   int64 [rows]

    Row (a, d) sees rows (b, 0) with b <= a, and (a, e) with e <= d.
    """
    theirs, own = anchors[:, None, :], anchors[:, :, None]
    of_text = (depths == 0) & (theirs <= own)
    return of_text | ((theirs == own) & (depths <= depths[:, None]))


class RolloutAttention:
    """An `Attend` (`models/heads/head_layer.py`) of rows that each see some of each other."""

    def __init__(self, seen: Tensor) -> None:
        """`seen`: bool [texts, rows, rows]."""
        self._seen = seen[:, None]

    def __call__(self, _layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[texts, rows, heads, head_dim]: what each row attends to."""
        queries, keys, values = (part.transpose(-3, -2) for part in (queries, keys, values))
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._seen, enable_gqa=True
        ).transpose(-3, -2)


def _rows(head: PEagle, embed: nn.Module, batch: TextBatch) -> TrainingRows:
    rows = text_rows(embed, batch)
    if not head.config.has_embedding:
        return rows
    return rows._replace(embeddings=head.embed_tokens(batch.tokens[:, 1:-1]))


def _embed(head: PEagle, embed: nn.Module) -> nn.Module:
    return head.embed_tokens if head.config.has_embedding else embed


def _known_masks(answers: Tensor, draft_length: int) -> Tensor:
    """int64 [texts, rows]: the number of masks after each row up to the end of the target's answer;
    0 where the target did not generate the row's own draft.
    """
    ahead = [functional.pad(answers[:, by:], (0, by)) for by in range(draft_length)]
    return torch.stack(ahead).long().cumprod(0)[1:].sum(0)


def _deepest_first(num_masks: Tensor) -> Rollouts:
    """The number of masks of each rollout, deepest first, int64 [texts, rows]."""
    ordered = num_masks.sort(dim=-1, descending=True, stable=True)
    width = int((num_masks > 0).sum(-1).max())
    return Rollouts(ordered.indices[:, :width], ordered.values[:, :width])


def _widths(rollouts: Rollouts, draft_length: int) -> list[int]:
    """Largest number of rollouts a text, for each depth from 1 on."""
    depths = torch.arange(1, draft_length, device=rollouts.anchors.device)
    return (rollouts.num_masks[..., None] >= depths).sum(1).amax(0).tolist()
