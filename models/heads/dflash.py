"""DFlash: a block of drafts in one pass, its masks filled in (arXiv 2602.06036; z-lab/dflash).

The target's states of the text enter every layer as keys and values alone. A block's first row is
the last committed token, whose state does not exist yet, the others are masks; its rows see the
text and each other, and row i fills in the token at its own position. No draft sees another's
token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .dflash_config import DFlashConfig
from .head_layer import Attend, HeadAttention, HeadMlp, HeadRotation


class BlockLayer(nn.Module):
    """One decoder layer of a block, as Qwen3 has it."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._index = index
        self.self_attn = HeadAttention(config, hidden)
        if config.has_output_bias:
            self.self_attn.o_proj = nn.Linear(config.num_heads * config.head_dim, hidden)
        self.mlp = HeadMlp(config, hidden)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[..., rows, hidden_size] of as many."""
        inputs = self.input_layernorm(states)
        states = states + self.self_attn(self._index, inputs, rotation, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class DFlash(nn.Module):
    """The drafter; its tensors have the published names."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(config.num_features * config.feature_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(BlockLayer(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.rotation = HeadRotation(config.head_dim, config.max_positions, config.rope)
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.has_token_map:
            # Offsets: draft token j is token j + d2t[j] of the target.
            self.d2t = nn.Buffer(torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def project(self, features: Tensor) -> Tensor:
        """[..., rows, hidden_size] of [..., rows, num_features * feature_size]."""
        return self.fc(features)

    def context(self, features: Tensor) -> Tensor:
        """The projection of the target's features that all layers read, once a token.

        [..., rows, hidden_size] of [..., rows, num_features * feature_size]
        """
        return self.hidden_norm(self.project(features))

    def context_keys(self, context: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [..., rows, kv_heads, head_dim] of `context` in each layer.

        positions  int64 [..., rows]  of the tokens whose features these are
        """
        rotation = self.rotation(context, positions)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            yield layer.self_attn.keys_values(context, rotation)

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed states [..., block_size, hidden_size], which the output head reads.

        embeddings  [..., block_size, hidden_size]  of the last committed token and the masks
        positions   int64 [..., block_size]  rising by 1 from that token's
        attend      the attention of a layer, given the block's queries, keys and values; it adds
                    the keys of the text, and the mask (`DFlashConfig.view`)
        """
        rotation = self.rotation(embeddings, positions)
        states = embeddings
        for layer in self.layers:
            states = layer(states, rotation, attend)
        return self.norm(states)

    def block(self, tokens: Tensor) -> Tensor:
        """int64 [..., block_size]: the tokens of blocks after last tokens int64 [...]."""
        block = tokens.new_full((*tokens.shape, self.config.block_size), self.config.mask_token)
        block[..., 0] = tokens
        return block

    def drafts(self, states: Tensor) -> Tensor:
        """[..., draft_length, hidden_size]: the rows of blocks that predict drafts, in order."""
        first = self.config.first_row
        return states[..., first : first + self.config.draft_length, :]

    def logits(self, raw: Tensor) -> Tensor:
        """float32 logits, scaled and bounded, of an output head's result."""
        config = self.config
        logits = raw.float() * config.output_multiplier
        cap = config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits
