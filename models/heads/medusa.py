"""Medusa's heads, which predict several tokens ahead from one state of the target.

Their only input is the target's normed last state of token i. The target's output head predicts
token i + 1, which is committed when a head drafts; head k (from 0) predicts token i + 2 + k. All
nodes of one depth share one distribution, independent of their ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

# Normed states [..., hidden_size] to logits [..., vocabulary].
OutputHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of Medusa's heads.

    draft_length      number of heads and of drafted tokens
    vocab_size        tokens of the target; 0: unknown, as the heads have no output matrix
    num_layers        residual blocks of each head
    output            `each` head has an output matrix, all share `one`, or the `target`'s
    draft_vocab_size  rows of its outputs; 0: the target's
    has_token_map     row j of its outputs is token `token_map[j]`
    """

    hidden_size: int
    draft_length: int
    vocab_size: int = 0
    num_layers: int = 1
    output: Literal["each", "one", "target"] = "each"
    draft_vocab_size: int = 0
    has_token_map: bool = False
    has_bias: bool = True

    @property
    def num_features(self) -> int:
        """States of the target for each token."""
        return 1

    @property
    def feature_size(self) -> int:
        """Width of it."""
        return self.hidden_size

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:  # noqa: ARG002 - as others
        """Empty: the last state alone, normed."""
        return ()


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=config.has_bias)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden_size] of the same shape."""
        return states + functional.silu(self.linear(states))


class Medusa(nn.Module):
    """Medusa's heads (Cai et al. 2024, arXiv 2401.10774): residual blocks, then an output matrix.

    Modules have the names of FasterDecoding's checkpoints: `0.0.linear` is the first block of the
    first head, and its output follows the last block.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        hidden, rows = config.hidden_size, config.draft_vocab_size
        for index in range(config.draft_length):
            parts: list[nn.Module] = [ResidualBlock(config) for _ in range(config.num_layers)]
            if config.output == "each":
                parts.append(nn.Linear(hidden, rows, bias=False))
            self.add_module(str(index), nn.Sequential(*parts))
        if config.output == "one":
            self.lm_head = nn.Linear(hidden, rows, bias=False)
        if config.has_token_map:
            self.token_map = nn.Buffer(torch.zeros(rows, dtype=torch.int64))

    def drafts(self, states: Tensor) -> Tensor:
        """[..., draft_length, hidden_size] of the target's normed states [..., hidden_size]."""
        return torch.stack(
            [self._parts(index)[: self.config.num_layers](states) for index in self._indices], -2
        )

    def logits(self, index: int, drafts: Tensor, target_head: OutputHead) -> Tensor:
        """[..., vocabulary], by target ids, from the output of head `index`, [..., hidden_size].

        Minus infinity for tokens outside the heads' vocabulary.
        """
        config = self.config
        if config.output == "target":
            return target_head(drafts)
        own = self._parts(index)[-1](drafts) if config.output == "each" else self.lm_head(drafts)
        if not config.has_token_map:
            return own
        logits = own.new_full((*own.shape[:-1], config.vocab_size), -torch.inf)
        return logits.index_copy(-1, self.token_map, own)

    @torch.no_grad()
    def begin_as(self, output: Tensor) -> None:
        """Initialise the heads to predict like the target: blocks add nothing, and outputs are
        copies of its output matrix [vocabulary, hidden_size] (the paper, section 2.2.1)."""
        for name, parameter in self.named_parameters():
            is_output = parameter.ndim == 2 and ".linear." not in name
            parameter.copy_(output) if is_output else parameter.zero_()

    @property
    def _indices(self) -> range:
        return range(self.config.draft_length)

    def _parts(self, index: int) -> nn.Sequential:
        head = self.get_submodule(str(index))
        assert isinstance(head, nn.Sequential)
        return head
