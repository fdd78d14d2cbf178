"""One training step of DSpark: DFlash's blocks with a Markov head over the previous token.

arXiv 2607.05147; DeepSpec. A row's draft follows the text's own token before it, not what the head
would have drafted there. The confidence head learns 1 - |q - p| / 2, the acceptance probability of
a sampled draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.heads.dspark import DSpark
from .anchored_blocks import Blocks, block_states, draft_shares, every_block, wanted_drafts
from .draft_positions import backpropagate, count_accepted
from .processes import mean_count, share_of_rows
from .target import TextBatch

# Weights of the three losses, and the decay of weights from draft to draft: exp(-1 / 4).
TOKEN_WEIGHT, DISTANCE_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY_DRAFTS = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """Labels of the drafts at one position of their blocks.

    tokens  int64 [texts, blocks]
    mask    bool [texts, blocks]  those that count
    states  [texts, blocks, hidden_size]  of the target, whose logits are of these tokens
    """

    tokens: Tensor
    mask: Tensor
    states: Tensor


def train_markov_blocks(
    drafter: DSpark, embedding: Tensor, lm_head: nn.Module, batch: TextBatch, blocks: Blocks
) -> list[float]:
    """Add gradients to the drafter's parameters; the mean loss of each draft.

    Arguments as of `train_blocks`. The loss is 0.1 of the tokens' cross-entropy, 0.9 of the
    distance |q - p| between the drafter's distribution and the target's, and the confidence head's
    cross-entropy with 1 - |q - p| / 2, a constant there.
    """
    rows = markov_rows(drafter, embedding, batch, blocks)
    drafts = list(_drafts(drafter, batch, blocks))
    shares = draft_shares([mean_count(int(draft.mask.sum())) for draft in drafts], DECAY_DRAFTS)
    losses = (partial(_loss, drafter, lm_head, draft) for draft in drafts)
    return backpropagate(rows, losses, shares)


@torch.no_grad()
def markov_acceptance(
    drafter: DSpark, embedding: Tensor, lm_head: nn.Module, batch: TextBatch, stride: int = 4
) -> list[tuple[int, int]]:
    """Of each draft: how often it follows accepted ones, and how often it is accepted then.

    As `block_acceptance`. After accepted drafts, the text's tokens equal the drafted ones.
    """
    blocks = every_block(batch, stride)
    rows = markov_rows(drafter, embedding, batch, blocks)
    wanted = ((draft.tokens, draft.mask) for draft in _drafts(drafter, batch, blocks))
    return count_accepted(rows, lambda _, own: markov_logits(drafter, lm_head, own), wanted)


def markov_rows(drafter: DSpark, embedding: Tensor, batch: TextBatch, blocks: Blocks) -> Tensor:
    """[texts, blocks, drafts, hidden_size + 2 rank]: for each draft its state, the Markov head's
    output for the previous token, and that token's embedding in the Markov head, side by side.
    """
    markov = drafter.markov_head
    assert markov is not None
    states = drafter.drafts(block_states(drafter, embedding, batch, blocks))
    memory = states.new_zeros((*states.shape[:-2], markov.markov_w1.embedding_dim))
    rows = []
    for draft, state in enumerate(states.unbind(-2)):
        before = _tokens_at(batch, blocks.anchors + draft)
        latent, memory = markov.latent(state, before, memory)
        rows.append(torch.cat([state, latent, markov.markov_w1(before)], dim=-1))
    return torch.stack(rows, dim=-2)


def markov_logits(drafter: DSpark, lm_head: nn.Module, rows: Tensor) -> Tensor:
    """float32 [..., vocabulary] of rows of one draft."""
    state, latent, _ = _parts(drafter, rows)
    assert drafter.markov_head is not None
    return drafter.logits(lm_head(state) + drafter.markov_head.markov_w2(latent))


def _drafts(drafter: DSpark, batch: TextBatch, blocks: Blocks) -> Iterator[_Draft]:
    """In a block, the drafts before the first one that the target did not generate count."""
    is_reached = blocks.is_real
    for index in range(drafter.config.draft_length):
        tokens, mask = wanted_drafts(batch, blocks, index)
        is_reached = is_reached & mask
        places = (blocks.anchors + index).clamp(max=batch.states.shape[1] - 1)
        width = batch.states.shape[-1]
        states = batch.states.gather(1, places.unsqueeze(-1).expand(-1, -1, width))
        yield _Draft(tokens, is_reached, states)


def _loss(drafter: DSpark, lm_head: nn.Module, draft: _Draft, rows: Tensor) -> Tensor:
    own = rows[draft.mask]
    logits = markov_logits(drafter, lm_head, own)
    with torch.no_grad():
        target_probs = lm_head(draft.states[draft.mask]).float().softmax(-1)
    distance = (logits.softmax(-1) - target_probs).abs().sum(-1)
    tokens = draft.tokens[draft.mask]
    losses = TOKEN_WEIGHT * functional.cross_entropy(logits, tokens, reduction="none")
    losses = losses + DISTANCE_WEIGHT * distance
    if drafter.config.confidence_size:
        state, _, embedded = _parts(drafter, own)
        confidence = drafter.confidence_head(state, embedded).float()
        is_accepted = 1 - distance.detach() / 2
        losses = losses + CONFIDENCE_WEIGHT * functional.binary_cross_entropy_with_logits(
            confidence, is_accepted, reduction="none"
        )
    return share_of_rows(losses, mean_count(len(losses)))


def _parts(drafter: DSpark, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rank = drafter.config.markov_rank
    state, latent, embedded = rows.split([drafter.config.hidden_size, rank, rank], dim=-1)
    return state, latent, embedded


def _tokens_at(batch: TextBatch, places: Tensor) -> Tensor:
    """int64 [texts, blocks]; beyond the end of a text, where nothing counts, its last token."""
    return batch.tokens.gather(1, places.clamp(max=batch.tokens.shape[1] - 1))
