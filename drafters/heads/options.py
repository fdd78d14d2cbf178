"""Options of head drafters."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ConfigError
from ..model.expansion import DynamicExpansion, Expansion
from ..model.options import DEVICES, DTYPES
from ..option_checks import require_one_of, require_whole

CHAIN, DYNAMIC = "chain", "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Options of `HeadDrafter`; raises `ConfigError` naming the option.

    tree        dynamic, EAGLE-2's tree of `top_k` nodes a level; or chain
    top_k       children of a node and width of a level in a dynamic tree
    num_tokens  levels of the tree, tokens of the chain; a SpecFormer drafts no more than it was
                trained to
    max_tokens  most tokens of a text that its keys and values are kept of; the oldest are let go
    device      auto (a GPU where one is), cpu or cuda
    dtype       as torch names it, or auto: float32 on CPUs, 16 bits on GPUs
    """

    tree: str = DYNAMIC
    top_k: int = 4
    num_tokens: int = 5
    max_tokens: int = 8192
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require_one_of("tree", self.tree, (CHAIN, DYNAMIC))
        require_whole("top_k", self.top_k, 1, 64)
        require_whole("num_tokens", self.num_tokens, 1, 64)
        require_whole("max_tokens", self.max_tokens, 64)
        require_one_of("device", self.device, DEVICES)
        require_one_of("dtype", self.dtype, DTYPES)
        if self.tree == CHAIN and self.top_k != HeadOptions.__dataclass_fields__["top_k"].default:
            raise ConfigError("top_k", f"is of tree: {DYNAMIC}, and tree is {self.tree}")

    def expansion(self, depth: int) -> Expansion:
        """A tree of at most `depth` levels."""
        width = 1 if self.tree == CHAIN else self.top_k
        return DynamicExpansion(width, min(depth, self.num_tokens))
