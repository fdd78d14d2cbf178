"""Logits of a block drafter behind a whole text, by the formulas of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from draftline.models.heads.dflash import DFlash
from draftline.models.heads.dspark import DSpark
from torch import Tensor

from . import head_checkpoints as published


def block_logits(model: Any, head: DFlash, features: Tensor, tokens: Sequence[int]) -> Tensor:
    """[drafts, vocabulary] behind all features; `tokens`: the last one of the text, and drafts.

    Of a draft behind more tokens than there are, the logits are not told.
    """
    config = head.config
    states = block_states(model, head, features, tokens[0])[config.first_row :]
    raw = head.lm_head(states) if config.draft_vocab_size else model.lm_head(states)
    if isinstance(head, DSpark) and head.markov_head is not None:
        count = min(len(tokens), len(raw))
        raw = raw[:count] + _added(head, states, tokens[:count])
    own = head.logits(raw)
    if not config.has_token_map:
        return own
    logits = torch.full((len(own), config.vocab_size), -torch.inf)
    logits[:, torch.arange(config.draft_vocab_size) + head.d2t] = own
    return logits


def block_states(model: Any, head: DFlash, features: Tensor, root: int) -> Tensor:
    """[block_size, hidden_size]: normed, of a block behind all features."""
    config, count = head.config, len(features)
    embed = head.embed_tokens if config.has_embedding else model.base_model.embed_tokens
    kept = list(head.context_keys(head.context(features), torch.arange(count)))
    block = torch.tensor([root, *[config.mask_token] * (config.block_size - 1)])
    places = torch.arange(count + config.block_size)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen = [torch.cat(pair)[:, 0] for pair in zip(kept[layer], (keys, values), strict=True)]
        scores = torch.einsum("qhd,kd->hqk", queries, seen[0]) / published.HEAD**0.5
        hidden = ~config.view(layer).sees(places[count:, None] - places)
        return torch.einsum(
            "hqk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), seen[1]
        )

    return head(embed(block) * config.embedding_scale, places[count:], attend)


def _added(head: DSpark, states: Tensor, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocabulary]: what each token adds to the logits of the next draft."""
    weights = head.state_dict()
    first, second = (weights[f"markov_head.markov_w{index}.weight"] for index in (1, 2))
    memory, added = torch.zeros(first.shape[1]), []
    for state, token in zip(states, tokens, strict=False):
        said = first[token]
        if head.config.markov_kind == "gated":
            weight, bias = (weights[f"markov_head.gate_proj.{name}"] for name in ("weight", "bias"))
            said = torch.sigmoid(weight @ torch.cat([state, said]) + bias) * said
        elif head.config.markov_kind == "rnn":
            weight, bias = (
                weights[f"markov_head.joint_proj.{name}"] for name in ("weight", "bias")
            )
            gate, new, output = (weight @ torch.cat([memory, said, state]) + bias).chunk(3)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1 - gate) * torch.tanh(new)
            said = torch.tanh(output)
        added.append(second @ said)
    return torch.stack(added)
