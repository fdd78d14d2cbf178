"""One training step of a drafter that predicts all its drafts at once: SpecFormer, Medusa.

In-batch gradient accumulation (SpecFormer, arXiv 2511.20340): for one draft position at a time, it
computes the logits and the loss, and backpropagates to the drafter's states. So only one position's
logits are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.heads.medusa import Medusa
from ...models.heads.spec_former import SpecFormer
from .feature_passes import is_aligned
from .processes import mean_count, share_of_rows
from .target import TextBatch

# Medusa's weight of a head's loss, against that of the head before it (arXiv 2401.10774, 2.2.1).
HEAD_DECAY = 0.8
# Maps a draft position and the drafter's states there, [rows, width], to logits [rows, vocabulary].
PositionLogits = Callable[[int, Tensor], Tensor]
# Maps a draft position and the drafter's states there to a loss.
PositionLoss = Callable[[Tensor], Tensor]


def counted_rows(batch: TextBatch, draft_length: int) -> Tensor:
    """bool [texts, rows]: the rows of which at least one draft is a token that the target
    generated. Row t reads the states of token t; its draft i is token t + 2 + i."""
    masks = [_wanted(batch, index)[1] for index in range(draft_length)]
    return torch.stack(masks).any(dim=0)


def random_rows(rows: Tensor, count: int, uniform: Tensor) -> Tensor:
    """At most `count` of the `rows` of each text, bool [texts, rows].

    uniform  float32 [texts, length]  random numbers from 0 to 1; the largest are taken
    """
    order = uniform[:, : rows.shape[1]].masked_fill(~rows, -1.0)
    best = order.topk(min(count, order.shape[1]), dim=-1).indices
    return rows & torch.zeros_like(rows).scatter(1, best, value=True)


def train_positions(
    drafter: SpecFormer, norm: nn.Module, lm_head: nn.Module, batch: TextBatch, rows: Tensor
) -> list[float]:
    """Add gradients to the drafter's parameters; the mean loss of each position, nats a token.

    norm, lm_head  the target's last norm and output head, which stay frozen
    rows           bool [texts, rows]  of `counted_rows`, those that draft
    """
    states = _states(drafter, batch, rows)
    count = states.shape[-2]
    wanted = _wanted_of(batch, rows, count)
    # A mean over all positions.
    losses = token_losses(lambda _, state: lm_head(norm(state)), wanted)
    return backpropagate(states, losses, [1 / count] * count)


def train_heads(
    heads: Medusa, lm_head: nn.Module, batch: TextBatch, weights: Sequence[float], rows: Tensor
) -> list[float]:
    """Add gradients to the heads' parameters; the mean loss of each head, nats a token.

    lm_head  the target's output head, which stay frozen
    weights  of the heads' losses

    Rows and drafts as in `train_positions`: head k of row t is trained on token t + 2 + k.
    """
    states = heads.drafts(batch.features[:, :-1][rows])
    wanted = _wanted_of(batch, rows, states.shape[-2])
    losses = token_losses(lambda place, own: heads.logits(place, own, lm_head), wanted)
    return backpropagate(states, losses, weights)


def token_losses(
    logits_of: PositionLogits, wanted: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[PositionLoss]:
    """Of each position, the cross-entropy of its states' drafts.

    logits_of  of a position and its states, logits [..., vocabulary]
    wanted     of each position, the right tokens int64 [...] and those that count, bool [...]
    """
    for place, (tokens, mask) in enumerate(wanted):
        yield partial(_loss, partial(logits_of, place), tokens=tokens, mask=mask)


def backpropagate(
    states: Tensor, losses: Iterable[PositionLoss], shares: Sequence[float]
) -> list[float]:
    """Add the gradients of all positions' losses; returns the losses, nats a token.

    states  [..., positions, width] with their autograd graph
    losses  of each position
    shares  of each position's loss in the total loss
    """
    # Separate leaves, so that a gradient only has the size of its position.
    leaves = [part.detach().requires_grad_() for part in states.unbind(-2)]
    found = []
    for leaf, loss_of, share in zip(leaves, losses, shares, strict=True):
        loss = loss_of(leaf)
        (share * loss).backward()
        found.append(loss.item())
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    torch.autograd.backward(states, torch.stack(gradients, dim=-2))
    return found


@torch.no_grad()
def position_acceptance(
    drafter: SpecFormer, norm: nn.Module, lm_head: nn.Module, batch: TextBatch
) -> list[tuple[int, int]]:
    """For each position: the number of drafts after accepted ones, and how many of them are
    accepted.

    Texts are assumed to be greedy: a draft is accepted if it is the text's next token.
    """
    rows = counted_rows(batch, drafter.config.draft_length)
    states = _states(drafter, batch, rows)
    wanted = _wanted_of(batch, rows, states.shape[-2])
    return count_accepted(states, lambda _, state: lm_head(norm(state)), wanted)


@torch.no_grad()
def head_acceptance(heads: Medusa, lm_head: nn.Module, batch: TextBatch) -> list[tuple[int, int]]:
    """As `position_acceptance`."""
    rows = counted_rows(batch, heads.config.draft_length)
    states = heads.drafts(batch.features[:, :-1][rows])
    wanted = _wanted_of(batch, rows, states.shape[-2])
    return count_accepted(states, lambda place, own: heads.logits(place, own, lm_head), wanted)


def count_accepted(
    states: Tensor, logits_of: PositionLogits, wanted: Iterable[tuple[Tensor, Tensor]]
) -> list[tuple[int, int]]:
    """As `position_acceptance`, with the arguments of `token_losses`."""
    follows = None
    counts = []
    for place, (state, own) in enumerate(zip(states.unbind(-2), wanted, strict=True)):
        tokens, mask = own
        follows = mask if follows is None else follows & mask
        accepted = is_aligned(logits_of(place, state), tokens, 1) & follows
        counts.append((int(follows.sum()), int(accepted.sum())))
        follows = accepted
    return counts


def _states(drafter: SpecFormer, batch: TextBatch, rows: Tensor) -> Tensor:
    """[n, draft_length, hidden_size] of the n `rows`."""
    features = batch.features[:, :-1]
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    return drafter.drafts(drafter.context(drafter.project(features), positions, _causal)[rows])


def _wanted_of(batch: TextBatch, rows: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """int64 and bool [n] for each of `count` drafts: the tokens of the n `rows`, and whether they
    count."""
    wanted = (_wanted(batch, index) for index in range(count))
    return [(tokens[rows], mask[rows]) for tokens, mask in wanted]


def _wanted(batch: TextBatch, index: int) -> tuple[Tensor, Tensor]:
    """int64 and bool [texts, rows]: the token of each row's draft, and whether it counts."""
    rows, ahead = batch.tokens.shape[1] - 1, index + 2
    tokens, mask = torch.zeros_like(batch.tokens), torch.zeros_like(batch.answers)
    known = batch.tokens.shape[1] - ahead
    if known > 0:
        tokens[:, :known] = batch.tokens[:, ahead:]
        mask[:, :known] = batch.answers[:, ahead:]
    return tokens[:, :rows], mask[:, :rows]


def _loss(
    logits_of: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor, mask: Tensor
) -> Tensor:
    """Computed only for the rows that count, since logits are most of the work."""
    logits = logits_of(states[mask]).float()
    losses = functional.cross_entropy(logits, tokens[mask], reduction="none")
    return share_of_rows(losses, mean_count(len(losses)))


def _causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries, keys, values = (part.transpose(-3, -2) for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    ).transpose(-3, -2)
