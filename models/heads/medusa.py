"""Medusa's heads, which predict several tokens ahead from one state of the target.

Their only input is the target's normed last state of token i. The target's output head predicts
token i + 1, which is committed when a head drafts; head k (from 0) predicts token i + 2 + k. All
nodes of one depth share one distribution, independent of their ancestors.

Checkpoints are published in four layouts. FasterDecoding's names are the modules' own
(`0.0.linear.weight`, output `0.1.weight`). Model Optimizer puts `medusa_heads.` before them,
Medusa-2 `medusa_head.`, both beside the whole model; TensorRT-LLM has
`medusa_heads.0.medusa_layers.0.linear.weight` and `medusa_heads.0.lm_head.weight`; vLLM
`blocks.0.layers.0.weight` and `lm_heads.0.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import CheckpointError
from .checkpoint_kind import Shapes

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


WRAPPED = re.compile(r"^medusa_heads?\.(?=\d)")
BLOCK = re.compile(r"^(?:(\d+)\.(?:medusa_layers\.)?(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.")
OUTPUT = re.compile(r"^(?:(\d+)\.lm_head|lm_heads\.(\d+))\.weight$")
# The served model's own tensors, where heads come in one file with it.
OF_TARGET = re.compile(r"^(?:transformer\.)?(?:layers|embed_tokens|norm|ln_f|lm_head)\.")
SHARED_OUTPUT, TOKEN_MAP = "lm_head.weight", "token_map"


def medusa_names(names: Shapes) -> dict[str, str]:
    """The modules' names by those of a checkpoint; tensors of the model beside it are left out.

    What fits none of the layouts keeps its name.
    """
    is_beside_model = any(WRAPPED.match(name) for name in names)
    own = {
        name: WRAPPED.sub("", name)
        for name in names
        if not (is_beside_model and OF_TARGET.match(name))
    }
    blocks = {name: _found(BLOCK, plain) for name, plain in own.items()}
    num_layers = 1 + max((int(found[1]) for found in blocks.values() if found), default=-1)
    num_heads = len({found[0] for found in blocks.values() if found})
    outputs = {name: _found(OUTPUT, plain) for name, plain in own.items()}
    is_one = num_heads > 1 and sum(name.startswith("lm_heads.") for name in own.values()) == 1
    for name, plain in own.items():
        block, output = blocks[name], outputs[name]
        if block is not None:
            own[name] = f"{block[0]}.{block[1]}.linear.{plain.rsplit('.', 1)[1]}"
        elif output is not None:
            # vLLM keeps an output that all heads share under the first one's name.
            own[name] = SHARED_OUTPUT if is_one else f"{output[0]}.{num_layers}.weight"
    return own


def _found(pattern: re.Pattern[str], name: str) -> tuple[str, ...] | None:
    match = pattern.match(name)
    return None if match is None else tuple(part for part in match.groups() if part is not None)


def medusa_config(shapes: Shapes, config: Mapping[str, Any]) -> MedusaConfig:
    """The config of a checkpoint under the modules' names: all of it of its tensors.

    The numbers of heads in FasterDecoding's config.json files are wrong. Raises `CheckpointError`
    naming what does not fit.
    """
    blocks = [found for name in shapes if (found := _found(BLOCK, name)) is not None]
    num_heads = 1 + max((int(head) for head, _ in blocks), default=-1)
    num_layers = 1 + max((int(layer) for _, layer in blocks), default=-1)
    shape = shapes.get("0.0.linear.weight")
    if shape is None or len(shape) != 2:
        raise CheckpointError("the Medusa heads have no matrix 0.0.linear.weight; fetch them again")
    output = SHARED_OUTPUT if SHARED_OUTPUT in shapes else f"0.{num_layers}.weight"
    rows = shapes.get(output, (0,))[0]
    has_token_map = TOKEN_MAP in shapes
    how: Literal["each", "one", "target"] = "one" if output == SHARED_OUTPUT else "each"
    vocab_size = int(config.get("vocab_size") or 0) if has_token_map else rows
    if has_token_map and (not vocab_size or not rows):
        raise CheckpointError(
            "the Medusa checkpoint has a token_map, which needs the heads' own output matrices and "
            "the target's vocab_size in config.json"
        )
    return MedusaConfig(
        hidden_size=shape[0],
        draft_length=num_heads,
        vocab_size=vocab_size,
        num_layers=num_layers,
        output=how if rows else "target",
        draft_vocab_size=rows,
        has_token_map=has_token_map,
        has_bias="0.0.linear.bias" in shapes,
    )


def check_medusa_map(config: MedusaConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` if the token map has ids outside the target's vocabulary."""
    if not config.has_token_map:
        return
    ids = tensors[TOKEN_MAP]
    is_map = bool((ids >= 0).all() and (ids < config.vocab_size).all())
    if not is_map or len(ids.unique()) != config.draft_vocab_size:
        raise CheckpointError(
            f"token_map does not name {config.draft_vocab_size} of {config.vocab_size} tokens"
        )
