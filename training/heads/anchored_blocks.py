"""One training step of a block drafter: blocks that begin at random tokens of the texts.

DFlash (arXiv 2602.06036; SpecForge, speculators). A block at token a, its anchor, is drafted as if
the text ended there. Its rows see each other and the target's states of the tokens before a, but
nothing after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...models.heads.dflash import DFlash
from ...models.heads.dflash_config import DFlashConfig
from .draft_positions import backpropagate, count_accepted, token_losses
from .processes import mean_count
from .target import TextBatch

# Loss weights fall by exp(-1 / g) from draft to draft, with g = 7 for blocks of 16 rows.
DECAY_ROWS = 7 / 16
# Blocks of each text in a step.
BLOCKS = 32


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How a step trains.

    num_anchors  places of each text where a step drafts; None: `BLOCKS` of block drafters, and all
                 of SpecFormer and Medusa
    """

    num_anchors: int | None = None


class Blocks(NamedTuple):
    """Blocks of texts.

    anchors  int64 [texts, blocks]  place of each block's first token
    is_real  bool [texts, blocks] False for padding, as a text may have fewer possible anchors than
             blocks
    """

    anchors: Tensor
    is_real: Tensor


def random_blocks(batch: TextBatch, count: int, uniform: Tensor) -> Blocks:
    """At most `count` blocks a text, at distinct tokens that the target generated, as was the next
    one.

    uniform  float32 [texts, length]  random numbers from 0 to 1; blocks begin at the largest
    """
    starts = _starts(batch)
    order = uniform.masked_fill(~starts, -1.0)
    best = order.topk(min(count, order.shape[1]), dim=-1)
    return Blocks(best.indices, best.values >= 0)


def every_block(batch: TextBatch, stride: int = 1) -> Blocks:
    """A block at each possible anchor, or at some of them."""
    starts = _starts(batch)[:, ::stride]
    places = torch.arange(batch.tokens.shape[1], device=starts.device)[::stride]
    return Blocks(places.expand(starts.shape), starts)


def train_blocks(
    drafter: DFlash, embedding: Tensor, lm_head: nn.Module, batch: TextBatch, blocks: Blocks
) -> list[float]:
    """Add gradients to the drafter's parameters; the mean loss of each draft, nats a token.

    embedding  [vocabulary, hidden_size]  the target's
    lm_head    its output head; both stay frozen

    The loss is a weighted mean of the drafts' cross-entropies; drafts far from the anchor are
    rarely reached and count less.
    """
    states = drafter.drafts(block_states(drafter, embedding, batch, blocks))
    wanted = [wanted_drafts(batch, blocks, draft) for draft in range(states.shape[-2])]
    decay = DECAY_ROWS * drafter.config.block_size
    shares = draft_shares([mean_count(int(mask.sum())) for _, mask in wanted], decay)
    losses = token_losses(lambda _, state: drafter.logits(lm_head(state)), wanted)
    return backpropagate(states, losses, shares)


@torch.no_grad()
def block_acceptance(
    drafter: DFlash, embedding: Tensor, lm_head: nn.Module, batch: TextBatch, stride: int = 4
) -> list[tuple[int, int]]:
    """For each depth: the number of drafts after accepted ones, and how many of them are accepted.

    Measured after every fourth token of the texts, which are assumed to be greedy. A block after
    each token would take as long as many steps.
    """
    blocks = every_block(batch, stride)
    states = drafter.drafts(block_states(drafter, embedding, batch, blocks))
    wanted = (wanted_drafts(batch, blocks, draft) for draft in range(states.shape[-2]))
    return count_accepted(states, lambda _, state: drafter.logits(lm_head(state)), wanted)


def block_states(drafter: DFlash, embedding: Tensor, batch: TextBatch, blocks: Blocks) -> Tensor:
    """[texts, blocks, block_size, hidden_size]: the drafter's output states."""
    config, anchors = drafter.config, blocks.anchors
    places = torch.arange(batch.tokens.shape[1], device=anchors.device)
    context = drafter.context(batch.features)
    kept = list(drafter.context_keys(context, places.expand(batch.tokens.shape)))
    with torch.no_grad():
        tokens = drafter.block(batch.tokens.gather(1, anchors))
        embeddings = torch.embedding(embedding, tokens) * config.embedding_scale
    rows = torch.arange(config.block_size, device=anchors.device)
    attention = AnchoredAttention(kept, anchors, config)
    return drafter(embeddings, anchors[..., None] + rows, attention)


def wanted_drafts(batch: TextBatch, blocks: Blocks, draft: int) -> tuple[Tensor, Tensor]:
    """int64 and bool [texts, blocks]: the target token of each block's draft, and whether it
    counts."""
    places = blocks.anchors + 1 + draft
    is_known = blocks.is_real & (places < batch.tokens.shape[1])
    places = places.clamp(max=batch.tokens.shape[1] - 1)
    return batch.tokens.gather(1, places), batch.answers.gather(1, places) & is_known


class AnchoredAttention:
    """An `Attend` (`models/heads/head_layer.py`) of blocks that begin within their texts."""

    def __init__(
        self, kept: Sequence[tuple[Tensor, Tensor]], anchors: Tensor, config: DFlashConfig
    ) -> None:
        """`kept`: keys and values [texts, length, kv_heads, head_dim] of each layer."""
        self._kept = kept
        self._anchors = anchors
        self._config = config

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[texts, blocks, block_size, heads, head_dim]: what each row attends to."""
        repeats = queries.shape[-2] // keys.shape[-2]
        before_keys, before_values, keys, values = (
            part.repeat_interleave(repeats, -2) for part in (*self._kept[index], keys, values)
        )
        queries = queries * queries.shape[-1] ** -0.5
        before = torch.einsum("tbrhd,tchd->tbhrc", queries, before_keys)
        own = torch.einsum("tbrhd,tbchd->tbhrc", queries, keys)
        seen_before, seen_own = self._seen(index, before.shape[-1], own.shape[-1])
        scores = torch.cat(
            [
                before.masked_fill(~seen_before[:, :, None], -torch.inf),
                own.masked_fill(~seen_own, -torch.inf),
            ],
            dim=-1,
        )
        shares = scores.softmax(-1)
        of_before, of_own = shares.split([before.shape[-1], own.shape[-1]], dim=-1)
        attended = torch.einsum("tbhrc,tchd->tbrhd", of_before, before_values)
        return attended + torch.einsum("tbhrc,tbchd->tbrhd", of_own, values)

    def _seen(self, index: int, length: int, block_size: int) -> tuple[Tensor, Tensor]:
        """bool [texts, blocks, block_size, length] and [block_size, block_size]."""
        rows = torch.arange(block_size, device=self._anchors.device)
        places = torch.arange(length, device=self._anchors.device)
        anchors = self._anchors[..., None, None]
        back = anchors + rows[:, None] - places
        view = self._config.view(index)
        is_before = (places < anchors) & view.sees(back)
        return is_before, view.sees(rows[:, None] - rows)


def _starts(batch: TextBatch) -> Tensor:
    """bool [texts, length]: where the target generated both a token and the next one."""
    starts = batch.answers.clone()
    starts[:, :-1] &= batch.answers[:, 1:]
    starts[:, -1] = False
    # The first token has no context.
    starts[:, 0] = False
    return starts


def draft_shares(counts: Sequence[float], decay: float) -> list[float]:
    """The share of each draft's mean loss in the total loss, by its weight and its rows.

    decay  draft k, from 0, has the weight exp(-k / decay)
    """
    weights = torch.arange(len(counts)).div(-decay).exp() * torch.tensor(counts)
    return (weights / weights.sum().clamp(min=1e-9)).tolist()
