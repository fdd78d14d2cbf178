"""One training step of a drafter that says all its drafts at once.

In-batch gradient accumulation (SpecFormer, arXiv 2511.20340): the logits of one position of the
drafts are made, judged and backpropagated to the drafter's states before those of the next, so that
one position's logits are in memory at a time, not all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.heads.spec_former import SpecFormer
from .alignment import is_aligned
from .passes import TextBatch


def train_positions(
    drafter: SpecFormer, norm: nn.Module, lm_head: nn.Module, batch: TextBatch
) -> list[float]:
    """Add gradients to the drafter's parameters; the mean loss of each position, nats a token.

    norm, lm_head  the target's last norm and output head, whose weights are left alone

    Row t reads the states of token t; its draft i is token t + 2 + i. Rows count whose token is one
    that the target said.
    """
    states = _states(drafter, batch)
    count = states.shape[-2]
    wanted = [_wanted(batch, index) for index in range(count)]
    # A mean over all positions.
    return backpropagate(states, lambda state: lm_head(norm(state)), wanted, [1 / count] * count)


def backpropagate(
    states: Tensor, logits_of: Callable[[Tensor], Tensor], wanted: Iterable[tuple[Tensor, Tensor]],
    shares: Sequence[float],
) -> list[float]:  # fmt: skip
    """Add the gradients of all positions' losses; these, nats a token.

    states     [..., positions, hidden_size]  with a graph behind them
    logits_of  of one position's states, logits [..., vocabulary]
    wanted     of each position, the right tokens int64 [...] and those that count, bool [...]
    shares     of each position's loss in that of all
    """
    # Apart, so that a position's gradient is no larger than the position.
    leaves = [part.detach().requires_grad_() for part in states.unbind(-2)]
    losses = []
    for leaf, (tokens, mask), share in zip(leaves, wanted, shares, strict=True):
        loss = _loss(logits_of, leaf, tokens, mask)
        (share * loss).backward()
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
    states = _states(drafter, batch)
    wanted = (_wanted(batch, index) for index in range(states.shape[-2]))
    return count_accepted(states, lambda state: lm_head(norm(state)), wanted)


def count_accepted(
    states: Tensor, logits_of: Callable[[Tensor], Tensor], wanted: Iterable[tuple[Tensor, Tensor]]
) -> list[tuple[int, int]]:
    """As `position_acceptance` tells it, of arguments as those of `backpropagate`."""
    follows = None
    counts = []
    for state, (tokens, mask) in zip(states.unbind(-2), wanted, strict=True):
        follows = mask if follows is None else follows & mask
        accepted = is_aligned(logits_of(state), tokens, 1) & follows
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


def _loss(
    logits_of: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor, mask: Tensor
) -> Tensor:
    """Of the rows that count alone, whose logits are the larger part of the work."""
    if not mask.any():
        return states.sum() * 0.0
    return functional.cross_entropy(logits_of(states[mask]).float(), tokens[mask])


def _causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries, keys, values = (part.transpose(-3, -2) for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    ).transpose(-3, -2)
