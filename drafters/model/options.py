"""Options of the model drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...core.errors import ConfigError
from ..option_checks import require_one_of, require_switches, require_whole
from ..tree_shape import read_tree_shape
from .draft_costs import DraftCosts
from .expansion import DynamicExpansion, Expansion, StaticExpansion
from .sequoia import SequoiaShapes
from .stopping_rules import Stopping, stop_rule
from .vocabulary.choice import VOCABULARIES, VOCABULARY_AUTO

DEVICES = ("auto", "cpu", "cuda")
COMPILES = ("auto", "off")
AUTO_WEIGHTS = "auto"
WEIGHTS = (AUTO_WEIGHTS, "int8")
SEQUOIA = "sequoia"
MAX_TOKENS = 1024
FASTEST, FULL = "fastest", "full"
# Most levels and nodes of a tree -> the tree.
Expansions = Callable[[int, int], Expansion]
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of `ModelDrafter`; raises `ConfigError` naming the option.

    vocabulary            of a model whose tokenizer is not the target's: tli drafts in the tokens
                          that both have, slem writes text that is encoded anew, slrs draws one
                          target token by what the bytes that are drafted may become; auto: what
                          fits better, or same, the target's
    tree                  chain; dynamic, EAGLE-2's tree of `top_k` nodes a level; sequoia, the
                          static tree that brings most tokens a second by what was accepted so
                          far; or a JSON file of a static tree (`drafters/tree_shape.py`). Requests
                          with penalties, biases or token lists get chains
    tree_size             of sequoia: fastest, the nodes and levels that bring most tokens a second;
                          or full, the most probable ones of as many as are allowed
    top_k                 children of a node and width of a level in a dynamic tree
    num_tokens            most tokens of the chain, levels of a tree; with slem as many draws as
                          write so many of the target's
    stop                  when a draft ends before that (`stopping_rules.py`): constant, heuristic,
                          confidence, svip or goodput
    distribution_size     k > 0: with a temperature, chains are drawn from the distribution of the k
                          most probable tokens, which is declared, as acceptance rules other than
                          `coupled` need it. Siblings of a static tree are draws without
                          replacement then (as Sequoia's)
    num_blocks            KV blocks of all requests; without a free one a request gets no proposal
    block_size            tokens of a KV block
    prefill_chunk         most rows of one pass
    device                auto (a GPU where one is), cpu or cuda
    weights               auto: in `dtype`; int8: those of linear layers rounded to 8 bits. Drafts
                          change a little, answers do not
    dtype                 as torch names it, or auto: float32 on CPUs, 16 bits on GPUs
    enforce_eager         no CUDA graphs on a GPU: a quicker start, slower drafts
    compile               auto: C++ kernels on a CPU, as of the target; off: torch's own
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = (
        "block_size",
        "prefill_chunk",
        "compile",
    )

    vocabulary: str = VOCABULARY_AUTO
    tree: str = "chain"
    tree_size: str = FASTEST
    top_k: int = 4
    num_tokens: int = 4
    distribution_size: int = 0
    stop: str = "constant"
    num_blocks: int = 1024
    block_size: int = 16
    prefill_chunk: int = 256
    weights: str = AUTO_WEIGHTS
    dtype: str = "auto"
    device: str = "auto"
    enforce_eager: bool = False
    compile: str = "auto"

    def __post_init__(self) -> None:
        require_one_of("vocabulary", self.vocabulary, VOCABULARIES)
        require_whole("num_tokens", self.num_tokens, 1, MAX_TOKENS)
        require_whole("top_k", self.top_k, 1, 64)
        require_whole("distribution_size", self.distribution_size, 0, 4096)
        require_one_of("tree_size", self.tree_size, (FASTEST, FULL))
        if self.tree_size != FASTEST and self.tree != SEQUOIA:
            raise ConfigError("tree_size", f"is of tree: {SEQUOIA}, and tree is {self.tree}")
        require_one_of("device", self.device, DEVICES)
        require_one_of("weights", self.weights, WEIGHTS)
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("compile", self.compile, COMPILES)
        require_switches(self, "enforce_eager")
        self.expansions()
        self.stop_rule(DraftCosts())
        for field in ("num_blocks", "block_size", "prefill_chunk"):
            require_whole(field, getattr(self, field), 1)

    def sequoia_shapes(self, costs: DraftCosts) -> SequoiaShapes | None:
        """The shapes of `tree: sequoia`; None for other trees."""
        if self.tree != SEQUOIA:
            return None
        return SequoiaShapes(costs, is_full=self.tree_size == FULL)

    def expansions(self, shapes: SequoiaShapes | None = None) -> Expansions | None:
        """A factory of trees by their most levels and nodes; None for chains.

        shapes  of `tree: sequoia`

        Raises `ConfigError`.
        """
        if self.tree == "chain":
            return None
        if self.tree == "dynamic":
            return lambda depth, max_nodes: DynamicExpansion(self.top_k, depth, max_nodes)
        if self.tree == SEQUOIA:

            def best(depth: int, max_nodes: int) -> Expansion:
                assert shapes is not None
                return StaticExpansion(shapes.shape(max_nodes, depth))

            return best
        shape = read_tree_shape(Path(self.tree))
        return lambda depth, _: StaticExpansion(shape.cut(depth))

    def stop_rule(self, costs: DraftCosts) -> Callable[[], Stopping]:
        """A factory of the rule that ends one request's chains. Raises `ConfigError`."""
        return stop_rule(self.stop, self.num_tokens, costs)
