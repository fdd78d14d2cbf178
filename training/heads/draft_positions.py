"""One training step of a drafter that says all its drafts at once: SpecFormer, Medusa, blockwise.

In-batch gradient accumulation (SpecFormer, arXiv 2511.20340): the logits of one position of the
drafts are made, judged and backpropagated to the drafter's states before those of the next, so that
one position's logits are in memory at a time, not all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.heads.parallel_heads import Blockwise, Medusa
from ...models.heads.spec_former import SpecFormer
from .alignment import is_aligned
from .passes import TextBatch

# Medusa's weight of a head's loss, against that of the head before it (arXiv 2401.10774, 2.2.1).
HEAD_DECAY = 0.8
# Of a draft's place and the drafter's states of it, [rows, width], their logits [rows, vocabulary].
PositionLogits = Callable[[int, Tensor], Tensor]


def train_positions(
    drafter: SpecFormer, norm: nn.Module, lm_head: nn.Module, batch: TextBatch
) -> list[float]:
    """Add gradients to the drafter's parameters; the mean loss of each position, nats a token.

    norm, lm_head  the target's last norm and output head, whose weights are left alone

    Row t reads the states of token t; its draft i is token t + 2 + i. Rows count whose token is one
    that the target said.
    """
    # A mean over all positions: each has its share.
    shares = [1 / drafter.config.draft_length] * drafter.config.draft_length
    states = _states(drafter, batch)
    return _train(states, lambda _, state: lm_head(norm(state)), shares, batch)


def train_heads(
    heads: Medusa | Blockwise, lm_head: nn.Module, batch: TextBatch, weights: Sequence[float]
) -> list[float]:
    """Add gradients to the heads' parameters; the mean loss of each head, nats a token.

    lm_head  the target's output head, whose weights are left alone
    weights  of the heads' losses

    Rows and drafts as in `train_positions`: head k of row t is trained on token t + 2 + k.
    """
    states = heads.drafts(batch.features[:, :-1])
    return _train(states, lambda place, own: heads.logits(place, own, lm_head), weights, batch)


def _train(
    states: Tensor, logits: PositionLogits, weights: Sequence[float], batch: TextBatch
) -> list[float]:
    """Add gradients for states [texts, rows, drafts, width] and what makes logits of them."""
    # Apart, so that a position's gradient is no larger than the position.
    leaves = [part.detach().requires_grad_() for part in states.unbind(-2)]
    losses = []
    for index, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
        tokens, mask = _wanted(batch, index)
        loss = _loss(logits(index, leaf[mask]), tokens[mask])
        (loss * weight).backward()
        losses.append(loss.item())
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    torch.autograd.backward(states, torch.stack(gradients, dim=-2))
    return losses


@torch.no_grad()
def position_acceptance(
    drafter: SpecFormer, norm: nn.Module, lm_head: nn.Module, batch: TextBatch
) -> list[tuple[int, int]]:
    """Of each position: drafts behind accepted ones, and how many of them are accepted.

    Texts are taken for greedy ones: a draft is accepted where it is the text's next token.
    """
    return _acceptance(_states(drafter, batch), lambda _, state: lm_head(norm(state)), batch)


@torch.no_grad()
def head_acceptance(
    heads: Medusa | Blockwise, lm_head: nn.Module, batch: TextBatch
) -> list[tuple[int, int]]:
    """As `position_acceptance`."""
    states = heads.drafts(batch.features[:, :-1])
    return _acceptance(states, lambda place, own: heads.logits(place, own, lm_head), batch)


def _acceptance(states: Tensor, logits: PositionLogits, batch: TextBatch) -> list[tuple[int, int]]:
    follows = None
    counts = []
    for index, state in enumerate(states.unbind(-2)):
        tokens, mask = _wanted(batch, index)
        follows = mask if follows is None else follows & mask
        accepted = is_aligned(logits(index, state), tokens, 1) & follows
        counts.append((int(follows.sum()), int(accepted.sum())))
        follows = accepted
    return counts


def _states(drafter: SpecFormer, batch: TextBatch) -> Tensor:
    """[texts, rows, draft_length, hidden_size]; the last row drafts nothing that is known."""
    features = batch.features[:, :-1]
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    return drafter.drafts(drafter.context(features, positions, _causal))


def _wanted(batch: TextBatch, index: int) -> tuple[Tensor, Tensor]:
    """int64 and bool [texts, rows]: the token of each row's draft, and whether it counts."""
    rows, ahead = batch.tokens.shape[1] - 1, index + 2
    tokens, mask = torch.zeros_like(batch.tokens), torch.zeros_like(batch.answers)
    known = batch.tokens.shape[1] - ahead
    if known > 0:
        tokens[:, :known] = batch.tokens[:, ahead:]
        mask[:, :known] = batch.answers[:, ahead:]
    return tokens[:, :rows], mask[:, :rows]


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    if not len(tokens):
        return logits.sum() * 0.0
    return functional.cross_entropy(logits.float(), tokens)


def _causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries, keys, values = (part.transpose(-3, -2) for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    ).transpose(-3, -2)
