"""Options of head drafters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import inf, log
from pathlib import Path
from typing import ClassVar

from ...core.errors import ConfigError
from ..model.expansion import BestFirstExpansion, DynamicExpansion, Expansion, StaticExpansion
from ..model.options import DEVICES, DTYPES, SEQUOIA
from ..option_checks import require_fraction, require_one_of, require_whole
from ..tree_shape import TreeShape, read_tree_shape, shape_of_widths

AUTO, CHAIN, DYNAMIC, BEST_FIRST = "auto", "chain", "dynamic", "best_first"
# Trees whose nodes are chosen for what they are, and so are no draws.
CHOSEN = (AUTO, DYNAMIC, BEST_FIRST)

# Most children of a node in a tree of the best nodes.
MOST_CHILDREN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Options of `HeadDrafter`; raises `ConfigError` naming the option.

    tree        dynamic, EAGLE-2's tree of `top_k` nodes a level; best_first, of heads that draft
                all levels at once, the most probable nodes of all; auto, the second where it can
                be; chain; sequoia, the static tree that brings most tokens a second by what was
                accepted so far; or a JSON file of a static tree (`drafters/tree_shape.py`)
    top_k       children of a node and width of a level in a dynamic tree
    num_tokens  levels of the tree, tokens of the chain; kinds that draft all levels at once have no
                more than they were trained to
    distribution_size  k > 0: with a temperature, the nodes of chains and static trees are drawn
                from the distribution of the k most probable tokens, which is declared, as
                acceptance rules other than `coupled` need it; siblings without replacement (as
                Sequoia's)
    min_confidence  of heads that estimate the confidence of each draft (DSpark): no nodes behind
                one where it is less; 0: as many as the tree has
    max_tokens  most tokens of a text that keys and values are kept of; the oldest are let go
    device      auto (a GPU where one is), cpu or cuda
    dtype       as torch names it, or auto: float32 on CPUs, 16 bits on GPUs
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = ("max_tokens",)

    tree: str = AUTO
    top_k: int = 4
    num_tokens: int = 5
    distribution_size: int = 0
    min_confidence: float = 0.0
    max_tokens: int = 8192
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require_whole("top_k", self.top_k, 1, 64)
        require_whole("num_tokens", self.num_tokens, 1, 64)
        require_whole("distribution_size", self.distribution_size, 0, 4096)
        require_whole("max_tokens", self.max_tokens, 64)
        require_fraction("min_confidence", self.min_confidence)
        require_one_of("device", self.device, DEVICES)
        require_one_of("dtype", self.dtype, DTYPES)
        if self.tree != SEQUOIA and self.tree not in CHOSEN:
            _shape_of(self.tree, self.num_tokens)

    @property
    def is_drawn(self) -> bool:
        """Whether nodes are drawn where there is a temperature."""
        return bool(self.distribution_size) and self.tree not in CHOSEN

    @property
    def stop_below(self) -> float:
        """The logarithm of `min_confidence`."""
        return log(self.min_confidence) if self.min_confidence else -inf

    def of_head(self, *, is_parallel: bool) -> HeadOptions:
        """Of a head, without `auto`. Raises `ConfigError` (`tree`)."""
        if self.tree == BEST_FIRST and not is_parallel:
            raise ConfigError(
                "tree", f"{BEST_FIRST} is of heads that draft all levels at once; take {DYNAMIC}"
            )
        if self.tree != AUTO:
            return self
        return replace(self, tree=BEST_FIRST if is_parallel else DYNAMIC)

    def expansion(self, depth: int, max_nodes: int) -> Expansion:
        """A tree of at most so many levels and nodes; `auto` and `sequoia` are none."""
        depth = min(depth, max_nodes, self.num_tokens)
        if self.tree == BEST_FIRST:
            return BestFirstExpansion(min(max_nodes, MOST_CHILDREN), depth)
        if self.tree == DYNAMIC:
            return DynamicExpansion(self.top_k, depth, max_nodes)
        return StaticExpansion(_shape_of(self.tree, self.num_tokens).cut(depth))


@cache
def _shape_of(tree: str, num_tokens: int) -> TreeShape:
    return shape_of_widths([1] * num_tokens) if tree == CHAIN else read_tree_shape(Path(tree))
